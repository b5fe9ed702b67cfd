// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stays in MODULE_STATE_COMING: init waits until a line is written to debugfs
 * patchbay_test_stall/release, at most ms= milliseconds, and then fails if
 * fail=1 is given, so that the load is rolled back. (busybox insmod then tries a
 * second time.)
 *
 * debugfs patchbay_test_stall/taken: whether the branch on stall_key is taken.
 */
#include <linux/completion.h>
#include <linux/debugfs.h>
#include <linux/jump_label.h>
#include <linux/module.h>
#include <linux/patchbay.h>
#include <linux/seq_file.h>

static DEFINE_STATIC_KEY_FALSE(stall_key);
PATCHBAY_DECLARE_KEY(stall_key);
DECLARE_STATIC_KEY_FALSE(patchbay_test_shared_key);

static unsigned int ms = 60000;
module_param(ms, uint, 0400);
static bool fail;
module_param(fail, bool, 0400);

static struct dentry *root;
static DECLARE_COMPLETION(released);

static ssize_t release_write(struct file *file, const char __user *from,
			     size_t size, loff_t *pos)
{
	complete(&released);
	return size;
}

static const struct file_operations release_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = release_write,
};

static int taken_show(struct seq_file *file, void *unused)
{
	seq_printf(file, "%d %d\n", static_branch_unlikely(&stall_key) ? 1 : 0,
		   static_branch_unlikely(&patchbay_test_shared_key) ? 1 : 0);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(taken);

static int __init patchbay_test_stall_init(void)
{
	root = debugfs_create_dir("patchbay_test_stall", NULL);
	if (IS_ERR(root))
		return PTR_ERR(root);
	debugfs_create_file("release", 0200, root, NULL, &release_fops);
	debugfs_create_file("taken", 0400, root, NULL, &taken_fops);

	wait_for_completion_timeout(&released, msecs_to_jiffies(ms));
	if (fail) {
		debugfs_remove_recursive(root);
		return -ENODEV;
	}
	return 0;
}

static void __exit patchbay_test_stall_exit(void)
{
	debugfs_remove_recursive(root);
}

module_init(patchbay_test_stall_init);
module_exit(patchbay_test_stall_exit);
MODULE_DESCRIPTION("A module that is slow to load, for tests of Patchbay");
MODULE_LICENSE("GPL");
