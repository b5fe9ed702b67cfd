// SPDX-License-Identifier: GPL-2.0-only
/*
 * Patchbay test module: static keys, tracepoints and locks that a shell in the
 * guest reads and works through files in debugfs (folder patchbay_test).
 */
#include <linux/module.h>
#include <linux/uaccess.h>

#include "test.h"

static struct dentry *root;

/* A branch in init text: the host has to leave its site alone after init. */
static DEFINE_STATIC_KEY_FALSE(init_only_key);

int read_number(const char __user *from, size_t size, unsigned long max,
		unsigned long *number)
{
	int ret = kstrtoul_from_user(from, size, 10, number);

	if (ret)
		return ret;
	return *number > max ? -ERANGE : 0;
}

static int __init patchbay_test_init(void)
{
	int ret;

	if (static_branch_unlikely(&init_only_key))
		pr_info("patchbay_test: init_only_key is on\n");

	root = debugfs_create_dir("patchbay_test", NULL);
	if (IS_ERR(root))
		return PTR_ERR(root);

	ret = keys_init(root);
	if (ret)
		goto out_remove;
	ret = bench_init(root);
	if (ret)
		goto out_remove;
	ret = tracepoints_init(root);
	if (ret)
		goto out_remove;
	ret = hold_init(root);
	if (ret)
		goto out_trace;
	ret = storm_init(root);
	if (ret)
		goto out_hold;
	return 0;

out_hold:
	hold_exit();
out_trace:
	tracepoints_exit();
out_remove:
	debugfs_remove_recursive(root);
	kinds_exit();
	return ret;
}

static void __exit patchbay_test_exit(void)
{
	debugfs_remove_recursive(root);
	storm_exit();
	hold_exit();
	tracepoints_exit();
	kinds_exit();
}

module_init(patchbay_test_init);
module_exit(patchbay_test_exit);
MODULE_DESCRIPTION("Static keys for tests of Patchbay");
MODULE_LICENSE("GPL");
