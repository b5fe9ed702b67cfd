// SPDX-License-Identifier: GPL-2.0-only
/*
 * storm: write "THREADS ROUNDS" and each of THREADS threads takes or drops
 * references on 16 keys at random, ROUNDS times (0 rounds: until "0 0" is
 * written), never more drops than takes of its own. "0 0" stops all threads.
 *
 * Reading gives
 *	running N	threads at work
 *	rounds N	rounds done by all threads since the start
 *	torn N		how often a branch was not taken although the thread held
 *			a reference: never
 * and for each key
 *	NAME COUNT HELD	static_key_count(), references that threads hold
 *
 * A thread keeps its references when its rounds are over, until "0 0".
 */
#include <linux/err.h>
#include <linux/kthread.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/patchbay.h>
#include <linux/random.h>
#include <linux/sched.h>
#include <linux/uaccess.h>

#include "test.h"

#define THREADS_MAX	16
#define REFERENCES_MAX	8

#define STORM_KEYS(_do)							\
	_do(0) _do(1) _do(2) _do(3) _do(4) _do(5) _do(6) _do(7)		\
	_do(8) _do(9) _do(10) _do(11) _do(12) _do(13) _do(14) _do(15)

#define DEFINE_STORM_KEY(_n)						\
	static DEFINE_STATIC_KEY_FALSE(storm_key_##_n);			\
	PATCHBAY_DECLARE_KEY(storm_key_##_n);				\
	static noinline bool storm_key_##_n##_taken(void)		\
	{								\
		return static_branch_likely(&storm_key_##_n) &&		\
		       static_branch_unlikely(&storm_key_##_n);		\
	}
STORM_KEYS(DEFINE_STORM_KEY)

struct storm_key {
	const char *name;
	struct static_key *key;
	bool (*taken)(void);
	atomic_t held;
};

#define STORM_KEY(_n)							\
	{								\
		.name = "storm_key_" #_n,				\
		.key = &storm_key_##_n.key,				\
		.taken = storm_key_##_n##_taken,			\
	},
static struct storm_key storm_keys[] = { STORM_KEYS(STORM_KEY) };

struct storm_thread {
	struct task_struct *task;
	unsigned int references[ARRAY_SIZE(storm_keys)];
};

static DEFINE_MUTEX(storm_mutex);	/* guards threads and rounds_wanted */
static struct storm_thread threads[THREADS_MAX];
static unsigned long rounds_wanted;
static atomic_t running;
static atomic_long_t rounds_done;
static atomic_long_t torn;

static void storm_take(struct storm_thread *thread, unsigned int i)
{
	static_key_slow_inc(storm_keys[i].key);
	atomic_inc(&storm_keys[i].held);
	thread->references[i]++;
}

static void storm_drop(struct storm_thread *thread, unsigned int i)
{
	thread->references[i]--;
	atomic_dec(&storm_keys[i].held);
	static_key_slow_dec(storm_keys[i].key);
}

static void storm_round(struct storm_thread *thread)
{
	unsigned int i = get_random_u32_below(ARRAY_SIZE(storm_keys));

	if (!thread->references[i])
		storm_take(thread, i);
	else if (thread->references[i] == REFERENCES_MAX ||
		 get_random_u32_below(2))
		storm_drop(thread, i);
	else
		storm_take(thread, i);

	if (thread->references[i] && !storm_keys[i].taken())
		atomic_long_inc(&torn);
	atomic_long_inc(&rounds_done);
}

static int storm(void *data)
{
	struct storm_thread *thread = data;
	unsigned long round;
	unsigned int i;

	for (round = 0; !rounds_wanted || round < rounds_wanted; round++) {
		if (kthread_should_stop())
			break;
		storm_round(thread);
		cond_resched();
	}
	atomic_dec(&running);

	set_current_state(TASK_INTERRUPTIBLE);
	while (!kthread_should_stop()) {
		schedule();
		set_current_state(TASK_INTERRUPTIBLE);
	}
	__set_current_state(TASK_RUNNING);

	for (i = 0; i < ARRAY_SIZE(storm_keys); i++)
		while (thread->references[i])
			storm_drop(thread, i);
	return 0;
}

static void storm_stop(void)
{
	int i;

	for (i = 0; i < THREADS_MAX; i++) {
		if (!threads[i].task)
			continue;
		kthread_stop(threads[i].task);
		threads[i].task = NULL;
	}
}

static int storm_start(unsigned int count, unsigned long rounds)
{
	struct task_struct *task;
	unsigned int i;

	rounds_wanted = rounds;
	atomic_long_set(&rounds_done, 0);
	atomic_long_set(&torn, 0);

	for (i = 0; i < count; i++) {
		atomic_inc(&running);
		task = kthread_run(storm, &threads[i], "storm/%u", i);
		if (IS_ERR(task)) {
			atomic_dec(&running);
			storm_stop();
			return PTR_ERR(task);
		}
		threads[i].task = task;
	}
	return 0;
}

static ssize_t storm_write(struct file *file, const char __user *from,
			   size_t size, loff_t *pos)
{
	char line[32] = { };
	unsigned long rounds;
	unsigned int count;
	int ret;

	if (size >= sizeof(line))
		return -EINVAL;
	if (copy_from_user(line, from, size))
		return -EFAULT;
	if (sscanf(line, "%u %lu", &count, &rounds) != 2 || count > THREADS_MAX)
		return -EINVAL;

	mutex_lock(&storm_mutex);
	storm_stop();
	ret = storm_start(count, rounds);
	mutex_unlock(&storm_mutex);
	return ret ? ret : size;
}

static int storm_show(struct seq_file *file, void *unused)
{
	int i;

	seq_printf(file, "running %d\n", atomic_read(&running));
	seq_printf(file, "rounds %ld\n", atomic_long_read(&rounds_done));
	seq_printf(file, "torn %ld\n", atomic_long_read(&torn));
	for (i = 0; i < ARRAY_SIZE(storm_keys); i++)
		seq_printf(file, "%s %d %d\n", storm_keys[i].name,
			   static_key_count(storm_keys[i].key),
			   atomic_read(&storm_keys[i].held));
	return 0;
}

static int storm_open(struct inode *inode, struct file *file)
{
	return single_open(file, storm_show, NULL);
}

static const struct file_operations storm_fops = {
	.owner = THIS_MODULE,
	.open = storm_open,
	.read = seq_read,
	.write = storm_write,
	.llseek = seq_lseek,
	.release = single_release,
};

int storm_init(struct dentry *root)
{
	debugfs_create_file("storm", 0600, root, NULL, &storm_fops);
	return 0;
}

void storm_exit(void)
{
	mutex_lock(&storm_mutex);
	storm_stop();
	mutex_unlock(&storm_mutex);
}
