// SPDX-License-Identifier: GPL-2.0-only
/* A key with 56 branches, and 1,000 keys with one branch each. */
#include <linux/patchbay.h>

#include "test.h"

DEFINE_STATIC_KEY_FALSE(many_key);

#define TAKEN		(static_branch_unlikely(&many_key) ? 1 : 0)
#define TAKEN_8		(TAKEN + TAKEN + TAKEN + TAKEN + \
			 TAKEN + TAKEN + TAKEN + TAKEN)

noinline unsigned int many_key_unlikely(void)
{
	return TAKEN_8 + TAKEN_8 + TAKEN_8 + TAKEN_8 + TAKEN_8 + TAKEN_8 +
	       TAKEN_8;
}

/* _do(_n0) to _do(_n9), and so on: digits are appended to the number */
#define DO_10(_do, _n)							\
	_do(_n##0) _do(_n##1) _do(_n##2) _do(_n##3) _do(_n##4)		\
	_do(_n##5) _do(_n##6) _do(_n##7) _do(_n##8) _do(_n##9)
#define DO_100(_do, _n)							\
	DO_10(_do, _n##0) DO_10(_do, _n##1) DO_10(_do, _n##2)		\
	DO_10(_do, _n##3) DO_10(_do, _n##4) DO_10(_do, _n##5)		\
	DO_10(_do, _n##6) DO_10(_do, _n##7) DO_10(_do, _n##8)		\
	DO_10(_do, _n##9)
#define DO_1000(_do)							\
	DO_100(_do, 0) DO_100(_do, 1) DO_100(_do, 2) DO_100(_do, 3)	\
	DO_100(_do, 4) DO_100(_do, 5) DO_100(_do, 6) DO_100(_do, 7)	\
	DO_100(_do, 8) DO_100(_do, 9)

#define DEFINE_BENCH_KEY(_n)						\
	static DEFINE_STATIC_KEY_FALSE(bench_key_##_n);			\
	PATCHBAY_DECLARE_KEY(bench_key_##_n);
DO_1000(DEFINE_BENCH_KEY)

#define BENCH_KEY(_n)	&bench_key_##_n.key,
struct static_key *const bench_keys[BENCH_KEYS] = { DO_1000(BENCH_KEY) };

#define BENCH_TAKEN(_n)	\
	taken += static_branch_unlikely(&bench_key_##_n) ? 1 : 0;

noinline unsigned int bench_keys_taken(void)
{
	unsigned int taken = 0;

	DO_1000(BENCH_TAKEN)
	return taken;
}
