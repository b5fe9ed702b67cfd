// SPDX-License-Identifier: GPL-2.0-only
/*
 * storm: write "THREADS ROUNDS" and each of THREADS threads takes or drops
 * references at random on 16 keys of its own and on the 1,000 of bench, ROUNDS
 * times (0 rounds: until "0 0" is written), never more drops than takes of its
 * own. One more thread attaches kprobes behind the branches of the 16 keys, and
 * takes them off again, for as long as the others are at work. "0 0" stops all.
 *
 * Reading gives
 *	running N	threads at work
 *	rounds N	rounds done by all threads since the start
 *	torn N		how often a branch was not taken although the thread held
 *			a reference: never
 *	probes N	kprobes that were attached
 *	refused N	kprobes that were not, because there is a branch
 * and for each key that anyone has a reference on
 *	NAME COUNT HELD	static_key_count(), references that threads hold
 *
 * A thread keeps its references when its rounds are over, until "0 0".
 */
#include <linux/err.h>
#include <linux/kprobes.h>
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
#define PAUSE_MAX	32	/* ticks between rounds, so that others get a turn */

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
};

#define STORM_KEY(_n)							\
	{								\
		.name = "storm_key_" #_n,				\
		.key = &storm_key_##_n.key,				\
		.taken = storm_key_##_n##_taken,			\
	},
static struct storm_key storm_keys[] = { STORM_KEYS(STORM_KEY) };

#define OWN_KEYS	ARRAY_SIZE(storm_keys)
#define ALL_KEYS	(OWN_KEYS + BENCH_KEYS)

struct storm_thread {
	struct task_struct *task;
	u8 references[ALL_KEYS];
};

static DEFINE_MUTEX(storm_mutex);	/* guards threads and rounds_wanted */
static struct storm_thread threads[THREADS_MAX];
static struct task_struct *prober;
static unsigned long rounds_wanted;
static atomic_t held[ALL_KEYS];
static atomic_t running;
static atomic_long_t rounds_done;
static atomic_long_t torn;
static atomic_long_t probes;
static atomic_long_t probes_refused;

static struct static_key *key_of(unsigned int i)
{
	return i < OWN_KEYS ? storm_keys[i].key : bench_keys[i - OWN_KEYS];
}

static void storm_take(struct storm_thread *thread, unsigned int i)
{
	static_key_slow_inc(key_of(i));
	atomic_inc(&held[i]);
	thread->references[i]++;
}

static void storm_drop(struct storm_thread *thread, unsigned int i)
{
	thread->references[i]--;
	atomic_dec(&held[i]);
	static_key_slow_dec(key_of(i));
}

static void storm_round(struct storm_thread *thread)
{
	/* Half of the time, the few on which all threads meet. */
	unsigned int i = get_random_u32_below(2) ?
		get_random_u32_below(OWN_KEYS) :
		OWN_KEYS + get_random_u32_below(BENCH_KEYS);

	if (!thread->references[i])
		storm_take(thread, i);
	else if (thread->references[i] == REFERENCES_MAX ||
		 get_random_u32_below(2))
		storm_drop(thread, i);
	else
		storm_take(thread, i);

	if (i < OWN_KEYS && thread->references[i] && !storm_keys[i].taken())
		atomic_long_inc(&torn);
	atomic_long_inc(&rounds_done);
}

static int nothing(struct kprobe *probe, struct pt_regs *regs)
{
	return 0;
}

static void nothing_after(struct kprobe *probe, struct pt_regs *regs,
			  unsigned long flags)
{
}

/* The instruction behind a branch. */
static void *behind(const struct jump_entry *entry)
{
	/* Whatever the bytes are just now, the target tells how far it is. */
	long distance = jump_entry_target(entry) - jump_entry_code(entry);
	bool near = distance >= -126 && distance <= 129;

	return (void *)jump_entry_code(entry) + (near ? 2 : 5);
}

static int storm_probe(void *data)
{
	struct jump_entry *entry;
	struct kprobe probe;
	unsigned int i;

	for (i = 0; !kthread_should_stop(); i++) {
		struct static_key *key = storm_keys[i % OWN_KEYS].key;

		/* Behind the first of a key's two branches is the second. */
		entry = (void *)(key->type & ~JUMP_TYPE_MASK);
		if (i % 8)
			entry++;
		probe = (struct kprobe) {
			.addr = behind(entry),
			.pre_handler = nothing,
			/*
			 * Keeps the probe an int3. can_optimize() does not
			 * know the target of a branch that is a NOP now, and
			 * may put a five-byte jump over it.
			 */
			.post_handler = nothing_after,
		};
		if (register_kprobe(&probe)) {
			atomic_long_inc(&probes_refused);
		} else {
			atomic_long_inc(&probes);
			schedule_timeout_interruptible(1);
			unregister_kprobe(&probe);
		}
		schedule_timeout_interruptible(1);
	}
	return 0;
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
		schedule_timeout_interruptible(get_random_u32_below(PAUSE_MAX));
	}
	atomic_dec(&running);

	set_current_state(TASK_INTERRUPTIBLE);
	while (!kthread_should_stop()) {
		schedule();
		set_current_state(TASK_INTERRUPTIBLE);
	}
	__set_current_state(TASK_RUNNING);

	for (i = 0; i < ALL_KEYS; i++)
		while (thread->references[i])
			storm_drop(thread, i);
	return 0;
}

static void storm_stop(void)
{
	int i;

	if (prober) {
		kthread_stop(prober);
		prober = NULL;
	}
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
	if (!count)
		return 0;

	task = kthread_run(storm_probe, NULL, "storm/probe");
	if (IS_ERR(task))
		return PTR_ERR(task);
	prober = task;
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
	unsigned int i;

	seq_printf(file, "running %d\n", atomic_read(&running));
	seq_printf(file, "rounds %ld\n", atomic_long_read(&rounds_done));
	seq_printf(file, "torn %ld\n", atomic_long_read(&torn));
	seq_printf(file, "probes %ld\n", atomic_long_read(&probes));
	seq_printf(file, "refused %ld\n", atomic_long_read(&probes_refused));
	for (i = 0; i < ALL_KEYS; i++) {
		int count = static_key_count(key_of(i));

		if (!count && !atomic_read(&held[i]))
			continue;
		if (i < OWN_KEYS)
			seq_printf(file, "%s", storm_keys[i].name);
		else
			seq_printf(file, "bench_key_%03u",
				   i - (unsigned int)OWN_KEYS);
		seq_printf(file, " %d %d\n", count, atomic_read(&held[i]));
	}
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
