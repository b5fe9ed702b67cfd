// SPDX-License-Identifier: GPL-2.0-only
/*
 * Branches on keys of patchbay_test from another module, so that the kernel
 * links the entries of both into the key.
 *
 * debugfs patchbay_test_user/{shared,lent}: how many of the two branches here
 * (one likely, one unlikely) are taken now.
 */
#include <linux/debugfs.h>
#include <linux/jump_label.h>
#include <linux/module.h>
#include <linux/seq_file.h>

DECLARE_STATIC_KEY_FALSE(patchbay_test_shared_key);
DECLARE_STATIC_KEY_FALSE(patchbay_test_lent_key);

static struct dentry *root;

static int shared_show(struct seq_file *file, void *unused)
{
	unsigned int taken = 0;

	if (static_branch_likely(&patchbay_test_shared_key))
		taken++;
	if (static_branch_unlikely(&patchbay_test_shared_key))
		taken++;
	seq_printf(file, "%u\n", taken);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(shared);

static int lent_show(struct seq_file *file, void *unused)
{
	unsigned int taken = 0;

	if (static_branch_likely(&patchbay_test_lent_key))
		taken++;
	if (static_branch_unlikely(&patchbay_test_lent_key))
		taken++;
	seq_printf(file, "%u\n", taken);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(lent);

static int __init patchbay_test_user_init(void)
{
	root = debugfs_create_dir("patchbay_test_user", NULL);
	if (IS_ERR(root))
		return PTR_ERR(root);
	debugfs_create_file("shared", 0400, root, NULL, &shared_fops);
	debugfs_create_file("lent", 0400, root, NULL, &lent_fops);
	return 0;
}

static void __exit patchbay_test_user_exit(void)
{
	debugfs_remove_recursive(root);
}

module_init(patchbay_test_user_init);
module_exit(patchbay_test_user_exit);
MODULE_DESCRIPTION("A second user of the keys of patchbay_test");
MODULE_LICENSE("GPL");
