// SPDX-License-Identifier: GPL-2.0-only
/*
 * keys/<name>/{count,raw,likely,unlikely,op,foreign}: what the guest itself knows
 * of a key, and its own operations on it.
 *
 *	count	 static_key_count()
 *	raw	 the counter as it stands in memory; writing sets it and patches
 *		 nothing, so write only what leaves the key on or off as it is
 *	likely	 likely branches on the key that are taken now
 *	unlikely the same for unlikely ones
 *	op	 write inc, dec, enable or disable; fast_inc, which fails on a
 *		 key that is off; for deferred keys dec_deferred, and flush for
 *		 what was deferred to happen now
 *	foreign	 write 1 to put a jump to the next instruction, which nobody
 *		 expects there, into the first site of the key that is a NOP; 0
 *		 to put the NOP back
 */
#include <linux/module.h>
#include <linux/patchbay.h>
#include <linux/string.h>
#include <linux/uaccess.h>

#include "test.h"

/* Functions of their own, so that the branches are compiled once per key. */
#define BRANCHES(_name, _key)						\
static noinline unsigned int _name##_likely(void)			\
{									\
	return static_branch_likely(&_key) ? 1 : 0;			\
}									\
static noinline unsigned int _name##_unlikely(void)			\
{									\
	return static_branch_unlikely(&_key) ? 1 : 0;			\
}

/* Guarded keys */
static DEFINE_STATIC_KEY_FALSE(false_key);
BRANCHES(false_key, false_key)
static DEFINE_STATIC_KEY_TRUE(true_key);
BRANCHES(true_key, true_key)

/* Memory that is read-only once the module has been initialised */
static DEFINE_STATIC_KEY_FALSE_RO(ro_key);
BRANCHES(ro_key, ro_key)

static DEFINE_STATIC_KEY_TRUE_RO(ro_true_key);
BRANCHES(ro_true_key, ro_true_key)

/* Keys that may be counted from outside */
static DEFINE_STATIC_KEY_FALSE(ref_key);
BRANCHES(ref_key, ref_key)
PATCHBAY_DECLARE_KEY(ref_key);
static DEFINE_STATIC_KEY_TRUE(ref_true_key);
BRANCHES(ref_true_key, ref_true_key)
PATCHBAY_DECLARE_KEY(ref_true_key);
PATCHBAY_DECLARE_KEY(many_key);

static DEFINE_STATIC_KEY_ARRAY_FALSE(array_keys, 4);
BRANCHES(array_key_0, array_keys[0])
BRANCHES(array_key_1, array_keys[1])
BRANCHES(array_key_2, array_keys[2])
BRANCHES(array_key_3, array_keys[3])
PATCHBAY_DECLARE_KEY(array_keys[0]);
PATCHBAY_DECLARE_KEY(array_keys[1]);
PATCHBAY_DECLARE_KEY(array_keys[2]);
PATCHBAY_DECLARE_KEY(array_keys[3]);

static DEFINE_STATIC_KEY_ARRAY_TRUE(true_array_keys, 2);
BRANCHES(true_array_key_0, true_array_keys[0])
BRANCHES(true_array_key_1, true_array_keys[1])
PATCHBAY_DECLARE_KEY(true_array_keys[0]);
PATCHBAY_DECLARE_KEY(true_array_keys[1]);

/* Nothing branches on it */
static DEFINE_STATIC_KEY_FALSE(siteless_key);
PATCHBAY_DECLARE_KEY(siteless_key);

/* patchbay_test_user branches on it as well */
DEFINE_STATIC_KEY_FALSE(patchbay_test_shared_key);
EXPORT_SYMBOL_GPL(patchbay_test_shared_key);
BRANCHES(shared_key, patchbay_test_shared_key)
PATCHBAY_DECLARE_KEY(patchbay_test_shared_key);

/* Defined here, but only patchbay_test_user branches on it */
DEFINE_STATIC_KEY_FALSE(patchbay_test_lent_key);
EXPORT_SYMBOL_GPL(patchbay_test_lent_key);
PATCHBAY_DECLARE_KEY(patchbay_test_lent_key);

static unsigned int no_branch(void)
{
	return 0;
}

#define KEY(_name, _key) \
	{ #_name, &(_key).key, _name##_likely, _name##_unlikely }

static const struct test_key test_keys[] = {
	KEY(false_key, false_key),
	KEY(true_key, true_key),
	{ "ro_key", &ro_key.key, ro_key_likely, ro_key_unlikely, true },
	{ "ro_true_key", &ro_true_key.key, ro_true_key_likely,
	  ro_true_key_unlikely, true },
	KEY(ref_key, ref_key),
	KEY(ref_true_key, ref_true_key),
	KEY(array_key_0, array_keys[0]),
	KEY(array_key_1, array_keys[1]),
	KEY(array_key_2, array_keys[2]),
	KEY(array_key_3, array_keys[3]),
	KEY(true_array_key_0, true_array_keys[0]),
	KEY(true_array_key_1, true_array_keys[1]),
	KEY(shared_key, patchbay_test_shared_key),
	{ "lent_key", &patchbay_test_lent_key.key, no_branch, no_branch },
	{ "siteless_key", &siteless_key.key, no_branch, no_branch },
	{ "many_key", &many_key.key, no_branch, many_key_unlikely },
};

static int count_show(struct seq_file *file, void *unused)
{
	const struct test_key *key = file->private;

	seq_printf(file, "%d\n", static_key_count(key->key));
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(count);

static int raw_get(void *data, u64 *count)
{
	const struct test_key *key = data;

	*count = (u64)atomic_read(&key->key->enabled);
	return 0;
}

static int raw_set(void *data, u64 count)
{
	const struct test_key *key = data;

	if (key->read_only)
		return -EPERM;
	atomic_set(&key->key->enabled, (int)count);
	return 0;
}
DEFINE_DEBUGFS_ATTRIBUTE_SIGNED(raw_fops, raw_get, raw_set, "%lld\n");

static int likely_show(struct seq_file *file, void *unused)
{
	const struct test_key *key = file->private;

	seq_printf(file, "%u\n", key->likely_taken());
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(likely);

static int unlikely_show(struct seq_file *file, void *unused)
{
	const struct test_key *key = file->private;

	seq_printf(file, "%u\n", key->unlikely_taken());
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(unlikely);

static ssize_t op_write(struct file *file, const char __user *from, size_t size,
			loff_t *pos)
{
	const struct test_key *key = file_inode(file)->i_private;
	char op[16] = { };

	if (key->read_only)
		return -EPERM;
	if (size >= sizeof(op))
		return -EINVAL;
	if (copy_from_user(op, from, size))
		return -EFAULT;

	if (sysfs_streq(op, "inc"))
		static_key_slow_inc(key->key);
	else if (sysfs_streq(op, "dec"))
		static_key_slow_dec(key->key);
	else if (sysfs_streq(op, "enable"))
		static_key_enable(key->key);
	else if (sysfs_streq(op, "disable"))
		static_key_disable(key->key);
	else if (sysfs_streq(op, "fast_inc"))
		return static_key_fast_inc_not_disabled(key->key) ? size : -EBUSY;
	else if (sysfs_streq(op, "dec_deferred") && key->dec_deferred)
		key->dec_deferred();
	else if (sysfs_streq(op, "flush") && key->flush)
		key->flush();
	else
		return -EINVAL;
	return size;
}

static const struct file_operations op_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = op_write,
};

#ifdef CONFIG_JUMP_LABEL
static ssize_t foreign_write(struct file *file, const char __user *from,
			     size_t size, loff_t *pos)
{
	static const u8 foreign[] = { 0xeb, 0x03, 0xcc, 0xcc, 0xcc };
	static const u8 foreign2[] = { 0xeb, 0x00 };
	static const u8 nop[] = { 0x0f, 0x1f, 0x44, 0x00, 0x00 };
	static const u8 nop2[] = { 0x66, 0x90 };
	const struct test_key *key = file_inode(file)->i_private;
	struct jump_entry *entry = THIS_MODULE->jump_entries;
	struct jump_entry *end = entry + THIS_MODULE->num_jump_entries;
	unsigned long on;
	int ret = read_number(from, size, 1, &on);

	if (ret)
		return ret;
	for (; entry < end; entry++) {
		void *site = (void *)jump_entry_code(entry);

		if (jump_entry_key(entry) != key->key)
			continue;
		if (!memcmp(site, on ? nop : foreign, sizeof(nop))) {
			test_text_poke(site, on ? foreign : nop, sizeof(nop));
			return size;
		}
		if (!memcmp(site, on ? nop2 : foreign2, sizeof(nop2))) {
			test_text_poke(site, on ? foreign2 : nop2, sizeof(nop2));
			return size;
		}
	}
	return -EBUSY;
}

static const struct file_operations foreign_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = foreign_write,
};
#endif /* CONFIG_JUMP_LABEL */

void keys_add(struct dentry *dir, const struct test_key *keys, size_t count)
{
	size_t i;

	for (i = 0; i < count; i++) {
		void *key = (void *)&keys[i];
		struct dentry *of = debugfs_create_dir(keys[i].name, dir);

		debugfs_create_file("count", 0400, of, key, &count_fops);
		debugfs_create_file("raw", 0600, of, key, &raw_fops);
		debugfs_create_file("likely", 0400, of, key, &likely_fops);
		debugfs_create_file("unlikely", 0400, of, key, &unlikely_fops);
		debugfs_create_file("op", 0200, of, key, &op_fops);
#ifdef CONFIG_JUMP_LABEL
		debugfs_create_file("foreign", 0200, of, key, &foreign_fops);
#endif
	}
}

int keys_init(struct dentry *root)
{
	struct dentry *keys = debugfs_create_dir("keys", root);

	keys_add(keys, test_keys, ARRAY_SIZE(test_keys));
	return kinds_init(root, keys);
}
