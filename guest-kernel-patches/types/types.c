// SPDX-License-Identifier: GPL-2.0-only
/*
 * Types that a discovery reads, as the debug information of an object. Those
 * below are private to a C file of Linux 6.12, as copies.
 */
#include <linux/jump_label.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/rbtree_latch.h>
#include <linux/sched.h>
#include <linux/tracepoint.h>
#include <asm/processor.h>

/* kernel/jump_label.c */
struct static_key_mod {
	struct static_key_mod *next;
	struct jump_entry *entries;
	struct module *mod;
};

/* arch/x86/kernel/alternative.c */
struct bp_patching_desc {
	struct text_poke_loc *vec;
	int nr_entries;
	atomic_t refs;
};

/* kernel/module/internal.h */
struct mod_tree_root {
	struct latch_tree_root root;
	unsigned long addr_min;
	unsigned long addr_max;
};

/* gcc describes the types of variables. */
struct bp_patching_desc a_bp_patching_desc;
struct cpuinfo_x86 a_cpuinfo_x86;
struct mod_tree_root a_mod_tree_root;
enum mod_mem_type a_mod_mem_type;
struct module a_module;
struct mutex a_mutex;
struct static_key a_static_key;
struct static_key_mod a_static_key_mod;
enum system_states a_system_states;
struct task_struct a_task_struct;
struct tracepoint a_tracepoint;
