// SPDX-License-Identifier: GPL-2.0-only
/*
 * Keys of the kinds that Documentation/staging/static-keys.rst has beside the
 * plain ones: from a configuration symbol, set in a CPU hotplug callback,
 * deferred, rate-limited, and of the type that the others wrap.
 *
 *	hotplug	write 1 to have the key hotplug_key on while the CPU that went
 *		or came last is offline, 0 to leave it as it is
 */
#include <linux/cpuhotplug.h>
#include <linux/jump_label_ratelimit.h>
#include <linux/module.h>
#include <linux/patchbay.h>
#include <linux/uaccess.h>

#include "test.h"

/* Never over by itself. */
#define DEFERRED_TIMEOUT	(3600UL * HZ)

static DEFINE_STATIC_KEY_MAYBE(CONFIG_X86_64, maybe_true_key);
static unsigned int maybe_true_likely(void)
{
	return static_branch_maybe(CONFIG_X86_64, &maybe_true_key) ? 1 : 0;
}

static unsigned int maybe_true_unlikely(void)
{
	return static_branch_unlikely(&maybe_true_key) ? 1 : 0;
}

static DEFINE_STATIC_KEY_MAYBE(CONFIG_PREEMPT_RT, maybe_false_key);
static unsigned int maybe_false_likely(void)
{
	return static_branch_likely(&maybe_false_key) ? 1 : 0;
}

static unsigned int maybe_false_unlikely(void)
{
	return static_branch_maybe(CONFIG_PREEMPT_RT, &maybe_false_key) ? 1 : 0;
}

static DEFINE_STATIC_KEY_FALSE(hotplug_key);
static unsigned int hotplug_likely(void)
{
	return static_branch_likely(&hotplug_key) ? 1 : 0;
}

static unsigned int hotplug_unlikely(void)
{
	return static_branch_unlikely(&hotplug_key) ? 1 : 0;
}

static DEFINE_STATIC_KEY_DEFERRED_FALSE(deferred_key, DEFERRED_TIMEOUT);
PATCHBAY_DECLARE_KEY(deferred_key);
static unsigned int deferred_likely(void)
{
	return static_branch_likely(&deferred_key.key) ? 1 : 0;
}

static unsigned int deferred_unlikely(void)
{
	return static_branch_unlikely(&deferred_key.key) ? 1 : 0;
}

static void deferred_dec(void)
{
	static_branch_slow_dec_deferred(&deferred_key);
}

static void deferred_flush(void)
{
	static_key_deferred_flush(&deferred_key);
}

static struct static_key_deferred limited_key = {
	.key = STATIC_KEY_INIT_FALSE,
};
PATCHBAY_DECLARE_KEY(limited_key);
static unsigned int limited_likely(void)
{
	/* static_key_true() is for keys that are initialised as true. */
	return static_key_enabled(&limited_key.key) ? 1 : 0;
}

static unsigned int limited_unlikely(void)
{
	return static_key_false(&limited_key.key) ? 1 : 0;
}

static void limited_dec(void)
{
	static_key_slow_dec_deferred(&limited_key);
}

static void limited_flush(void)
{
	static_key_deferred_flush(&limited_key);
}

static struct static_key bare_key = STATIC_KEY_INIT_FALSE;
PATCHBAY_DECLARE_KEY(bare_key);
static unsigned int bare_likely(void)
{
	return static_key_enabled(&bare_key) ? 1 : 0;
}

static unsigned int bare_unlikely(void)
{
	return static_key_false(&bare_key) ? 1 : 0;
}

#define KIND(_name, _key)						\
	.name = #_name "_key", .key = (_key),				\
	.likely_taken = _name##_likely, .unlikely_taken = _name##_unlikely

static const struct test_key kinds[] = {
	{ KIND(maybe_true, &maybe_true_key.key) },
	{ KIND(maybe_false, &maybe_false_key.key) },
	{ KIND(hotplug, &hotplug_key.key) },
	{
		KIND(deferred, &deferred_key.key.key),
		.dec_deferred = deferred_dec,
		.flush = deferred_flush,
	}, {
		KIND(limited, &limited_key.key),
		.dec_deferred = limited_dec,
		.flush = limited_flush,
	},
	{ KIND(bare, &bare_key) },
};

/* Both are called with the CPUs' lock held for writing. */
static int hotplug_online(unsigned int cpu)
{
	static_branch_disable_cpuslocked(&hotplug_key);
	return 0;
}

static int hotplug_offline(unsigned int cpu)
{
	static_branch_enable_cpuslocked(&hotplug_key);
	return 0;
}

static DEFINE_MUTEX(hotplug_mutex);
/* 0: no callbacks. */
static int hotplug_state;

static int hotplug_set(bool on)
{
	int ret = 0;

	mutex_lock(&hotplug_mutex);
	if (on && !hotplug_state) {
		ret = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN,
						"patchbay_test:online",
						hotplug_online, hotplug_offline);
		if (ret > 0)
			hotplug_state = ret;
	} else if (!on && hotplug_state) {
		cpuhp_remove_state_nocalls(hotplug_state);
		hotplug_state = 0;
	}
	mutex_unlock(&hotplug_mutex);
	return min(ret, 0);
}

static ssize_t hotplug_write(struct file *file, const char __user *from,
			     size_t size, loff_t *pos)
{
	unsigned long on;
	int ret = read_number(from, size, 1, &on);

	if (!ret)
		ret = hotplug_set(on);
	return ret ? ret : size;
}

static const struct file_operations hotplug_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = hotplug_write,
};

int kinds_init(struct dentry *root, struct dentry *keys)
{
	jump_label_rate_limit(&limited_key, DEFERRED_TIMEOUT);
	keys_add(keys, kinds, ARRAY_SIZE(kinds));
	debugfs_create_file("hotplug", 0200, root, NULL, &hotplug_fops);
	return 0;
}

void kinds_exit(void)
{
	hotplug_set(false);
	/* Work of the module's own memory. */
	deferred_flush();
	limited_flush();
}
