/* SPDX-License-Identifier: GPL-2.0-only */
#ifndef _PATCHBAY_TEST_H
#define _PATCHBAY_TEST_H

#include <linux/debugfs.h>
#include <linux/jump_label.h>
#include <linux/seq_file.h>

/* Each makes its own files below the module's debugfs folder. */
int keys_init(struct dentry *root);
int kinds_init(struct dentry *root, struct dentry *keys);
void kinds_exit(void);
int bench_init(struct dentry *root);
int hold_init(struct dentry *root);
void hold_exit(void);
#ifdef CONFIG_JUMP_LABEL
int storm_init(struct dentry *root);
void storm_exit(void);
int poke_init(struct dentry *dir);
void poke_exit(void);
#else
static inline int storm_init(struct dentry *root) { return 0; }
static inline void storm_exit(void) { }
static inline int poke_init(struct dentry *dir) { return 0; }
static inline void poke_exit(void) { }
#endif
int tracepoints_init(struct dentry *root);
void tracepoints_exit(void);

/* One key of the module as the files in keys/<name>/ see it. */
struct test_key {
	const char *name;
	struct static_key *key;
	/* How many likely and unlikely branches are taken right now. */
	unsigned int (*likely_taken)(void);
	unsigned int (*unlikely_taken)(void);
	bool read_only;
	/* Of deferred keys. */
	void (*dec_deferred)(void);
	void (*flush)(void);
};

void keys_add(struct dentry *dir, const struct test_key *keys, size_t count);

#define MANY_SITES	56
#define BENCH_KEYS	1000

extern struct static_key_false many_key;
unsigned int many_key_unlikely(void);

extern struct static_key *const bench_keys[BENCH_KEYS];
unsigned int bench_keys_taken(void);

/* Any symbol of the kernel, or NULL; from hold_init() on. */
void *lookup_symbol(const char *name);

/* Changes @size bytes of text as the kernel does it while all CPUs run. */
void test_text_poke(void *site, const void *bytes, size_t size);

/* A number from user space: decimal, at most @max. */
int read_number(const char __user *from, size_t size, unsigned long max,
		unsigned long *number);

#endif
