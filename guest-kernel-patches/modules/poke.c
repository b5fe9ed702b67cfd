// SPDX-License-Identifier: GPL-2.0-only
/*
 * Text changes that stand still half-way, each for N milliseconds after N was
 * written to its file; text_queue and text_poke return from the write when the
 * change is made.
 *
 * hold/poke: the next change of a branch by the kernel itself stops on one CPU,
 * which spins: breakpoints written, new bytes not. Reading gives 1 meanwhile.
 *
 * hold/text_queue: a change of this module's own text is queued and not made.
 * No mutex is held.
 *
 * hold/text_poke: a change of this module's own text stops as in hold/poke, but
 * no mutex is held either: only the reference to the breakpoint's description
 * tells of it.
 */
#include <linux/delay.h>
#include <linux/jump_label.h>
#include <linux/kprobes.h>
#include <linux/memory.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched.h>

#include "test.h"

#define POKE_MAX_MS	10000UL
#define SITE_SIZE	5

/* None of these is exported, and only kprobes tell where they are. */
static struct {
	void (*poke_bp)(void *addr, const void *opcode, size_t len,
			const void *emulate);
	void (*poke_queue)(void *addr, const void *opcode, size_t len,
			   const void *emulate);
	void (*poke_finish)(void);
	struct mutex *text_mutex;
	struct mutex *jump_label_mutex;
} text;

static atomic_long_t stall_ms;
static struct task_struct *own_poker;
static bool stalled;

/*
 * Once the first byte of each site is a breakpoint, all CPUs are made to see
 * it. Only pokes of jump labels and those of text_poke stop here.
 */
static int poke_stall(struct kprobe *probe, struct pt_regs *regs)
{
	long ms;

	if (!mutex_is_locked(text.jump_label_mutex) &&
	    READ_ONCE(own_poker) != current)
		return 0;
	ms = atomic_long_xchg(&stall_ms, 0);
	if (!ms)
		return 0;
	WRITE_ONCE(stalled, true);
	while (ms--)
		mdelay(1);
	WRITE_ONCE(stalled, false);
	return 0;
}

static struct kprobe poke_probe = {
	.symbol_name = "do_sync_core",
	.pre_handler = poke_stall,
};

void test_text_poke(void *site, const void *bytes, size_t size)
{
	mutex_lock(text.text_mutex);
	text.poke_bp(site, bytes, size, NULL);
	mutex_unlock(text.text_mutex);
}

static ssize_t poke_write(struct file *file, const char __user *from,
			  size_t size, loff_t *pos)
{
	unsigned long ms;
	int ret = read_number(from, size, POKE_MAX_MS, &ms);

	if (ret)
		return ret;
	atomic_long_set(&stall_ms, ms);
	return size;
}

static int poke_show(struct seq_file *file, void *unused)
{
	seq_printf(file, "%d\n", READ_ONCE(stalled));
	return 0;
}

static int poke_open(struct inode *inode, struct file *file)
{
	return single_open(file, poke_show, NULL);
}

static const struct file_operations poke_fops = {
	.owner = THIS_MODULE,
	.open = poke_open,
	.read = seq_read,
	.write = poke_write,
	.llseek = seq_lseek,
	.release = single_release,
};

extern char own_site[];

/* Holds five bytes that may change between a NOP and a jump to the next one. */
static noinline __noclone void own_function(void)
{
	asm volatile("own_site: .byte 0x0f, 0x1f, 0x44, 0x00, 0x00");
}

static const u8 own_bytes[2][SITE_SIZE] = {
	{ 0x0f, 0x1f, 0x44, 0x00, 0x00 },
	{ 0xe9, 0x00, 0x00, 0x00, 0x00 },
};

/* What the site does not hold now. */
static const u8 *other_bytes(void)
{
	return own_bytes[!memcmp(own_site, own_bytes[0], SITE_SIZE)];
}

/* Users of the two files below, one after another. */
static DEFINE_MUTEX(own_mutex);

static ssize_t text_queue_write(struct file *file, const char __user *from,
				size_t size, loff_t *pos)
{
	unsigned long ms;
	int ret = read_number(from, size, POKE_MAX_MS, &ms);

	if (ret)
		return ret;
	mutex_lock(&own_mutex);
	mutex_lock(text.text_mutex);
	text.poke_queue(own_site, other_bytes(), SITE_SIZE, NULL);
	mutex_unlock(text.text_mutex);
	msleep(ms);
	mutex_lock(text.text_mutex);
	text.poke_finish();
	mutex_unlock(text.text_mutex);
	own_function();
	mutex_unlock(&own_mutex);
	return size;
}

static const struct file_operations text_queue_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = text_queue_write,
};

static ssize_t text_poke_write(struct file *file, const char __user *from,
			       size_t size, loff_t *pos)
{
	unsigned long ms;
	int ret = read_number(from, size, POKE_MAX_MS, &ms);

	if (ret)
		return ret;
	mutex_lock(&own_mutex);
	WRITE_ONCE(own_poker, current);
	atomic_long_set(&stall_ms, ms);
	text.poke_bp(own_site, other_bytes(), SITE_SIZE, NULL);
	WRITE_ONCE(own_poker, NULL);
	own_function();
	mutex_unlock(&own_mutex);
	return size;
}

static const struct file_operations text_poke_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = text_poke_write,
};

int poke_init(struct dentry *dir)
{
	int ret;

	/* The first name is that of 6.16 and later. */
	text.poke_bp = lookup_symbol("smp_text_poke_single") ?:
		       lookup_symbol("text_poke_bp");
	text.poke_queue = lookup_symbol("smp_text_poke_batch_add") ?:
			  lookup_symbol("text_poke_queue");
	text.poke_finish = lookup_symbol("smp_text_poke_batch_finish") ?:
			   lookup_symbol("text_poke_finish");
	text.text_mutex = lookup_symbol("text_mutex");
	text.jump_label_mutex = lookup_symbol("jump_label_mutex");
	if (!text.poke_bp || !text.poke_queue || !text.poke_finish ||
	    !text.text_mutex || !text.jump_label_mutex)
		return -ENOENT;
	ret = register_kprobe(&poke_probe);
	if (ret)
		return ret;
	debugfs_create_file("poke", 0600, dir, NULL, &poke_fops);
	debugfs_create_file("text_queue", 0200, dir, NULL, &text_queue_fops);
	debugfs_create_file("text_poke", 0200, dir, NULL, &text_poke_fops);
	return 0;
}

void poke_exit(void)
{
	unregister_kprobe(&poke_probe);
}
