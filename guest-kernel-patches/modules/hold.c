// SPDX-License-Identifier: GPL-2.0-only
/*
 * hold/<mutex>: write N to take a mutex of the kernel and keep it for at most N
 * milliseconds, 0 to let go now. Reading gives 1 while it is held. The write
 * returns once the mutex is taken, or given back.
 *
 * The mutexes are static or not exported: kprobes tell where they are.
 */
#include <linux/completion.h>
#include <linux/err.h>
#include <linux/kallsyms.h>
#include <linux/kprobes.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/mutex.h>

#include "test.h"

#define HOLD_MAX_MS	600000UL

struct held_mutex {
	const char *name;
	struct mutex *mutex;
	struct mutex lock;		/* guards holder */
	struct task_struct *holder;
	unsigned long ms;
	struct completion taken;
	struct completion let_go;
	bool held;
};

static struct held_mutex held_mutexes[] = {
	{ .name = "jump_label_mutex" },
	{ .name = "text_mutex" },
	{ .name = "tracepoints_mutex" },
	{ .name = "module_mutex" },
};

static int hold(void *data)
{
	struct held_mutex *held = data;

	mutex_lock(held->mutex);
	WRITE_ONCE(held->held, true);
	complete(&held->taken);
	wait_for_completion_timeout(&held->let_go, msecs_to_jiffies(held->ms));
	WRITE_ONCE(held->held, false);
	mutex_unlock(held->mutex);

	/* Stay until kthread_stop(), so that there is always one to stop. */
	set_current_state(TASK_INTERRUPTIBLE);
	while (!kthread_should_stop()) {
		schedule();
		set_current_state(TASK_INTERRUPTIBLE);
	}
	__set_current_state(TASK_RUNNING);
	return 0;
}

static int set_held(struct held_mutex *held, unsigned long ms)
{
	struct task_struct *holder;
	int ret = 0;

	mutex_lock(&held->lock);
	if (held->holder) {
		complete(&held->let_go);
		kthread_stop(held->holder);
		held->holder = NULL;
	}
	if (ms) {
		held->ms = ms;
		reinit_completion(&held->taken);
		reinit_completion(&held->let_go);
		holder = kthread_run(hold, held, "hold/%s", held->name);
		if (IS_ERR(holder)) {
			ret = PTR_ERR(holder);
		} else {
			held->holder = holder;
			wait_for_completion(&held->taken);
		}
	}
	mutex_unlock(&held->lock);
	return ret;
}

static ssize_t hold_write(struct file *file, const char __user *from,
			  size_t size, loff_t *pos)
{
	struct seq_file *seq = file->private_data;
	unsigned long ms;
	int ret = read_number(from, size, HOLD_MAX_MS, &ms);

	if (!ret)
		ret = set_held(seq->private, ms);
	return ret ? ret : size;
}

static int hold_show(struct seq_file *file, void *unused)
{
	struct held_mutex *held = file->private;

	seq_printf(file, "%d\n", READ_ONCE(held->held));
	return 0;
}

static int hold_open(struct inode *inode, struct file *file)
{
	return single_open(file, hold_show, inode->i_private);
}

static const struct file_operations hold_fops = {
	.owner = THIS_MODULE,
	.open = hold_open,
	.read = seq_read,
	.write = hold_write,
	.llseek = seq_lseek,
	.release = single_release,
};

static unsigned long (*lookup_name)(const char *name);

static int find_lookup_name(void)
{
	struct kprobe probe = { .symbol_name = "kallsyms_lookup_name" };
	int ret = register_kprobe(&probe);

	if (ret)
		return ret;
	lookup_name = (void *)probe.addr;
	unregister_kprobe(&probe);
	return 0;
}

void *lookup_symbol(const char *name)
{
	return (void *)lookup_name(name);
}

int hold_init(struct dentry *root)
{
	struct dentry *dir;
	int i, ret;

	ret = find_lookup_name();
	if (ret)
		return ret;
	for (i = 0; i < ARRAY_SIZE(held_mutexes); i++) {
		struct held_mutex *held = &held_mutexes[i];

		held->mutex = lookup_symbol(held->name);
		mutex_init(&held->lock);
		init_completion(&held->taken);
		init_completion(&held->let_go);
	}

	dir = debugfs_create_dir("hold", root);
	for (i = 0; i < ARRAY_SIZE(held_mutexes); i++) {
		/* There is no jump_label_mutex without jump labels. */
		if (held_mutexes[i].mutex)
			debugfs_create_file(held_mutexes[i].name, 0600, dir,
					    &held_mutexes[i], &hold_fops);
	}
	return poke_init(dir);
}

void hold_exit(void)
{
	int i;

	for (i = 0; i < ARRAY_SIZE(held_mutexes); i++)
		set_held(&held_mutexes[i], 0);
	poke_exit();
}
