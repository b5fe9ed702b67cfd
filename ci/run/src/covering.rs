// SPDX-License-Identifier: Apache-2.0
//! Makes binary covering arrays of strength 2: in any two columns, the rows show all four
//! combinations.
//!
//! The construction is optimal (Katona, "Two applications (for search theory and truth functions)
//! of Sperner type theorems", 1973; Kleitman and Spencer, "Families of k-independent sets", 1973).
//! One row is 0 in all columns. Each column is 1 in ⌈N/2⌉ of the other N-1 rows, and no two columns
//! are 1 in the same rows. Such sets of rows meet, because together they have more than N-1 rows,
//! and neither contains the other, because they have the same size. So two columns show 11, 10 and
//! 01, and the first row shows 00. N rows are enough for C(N-1, ⌈N/2⌉) columns.

/// Returns the rows of the array. A row is the ascending list of the columns that are 1 in it. The
/// first row is empty.
pub fn rows(columns: usize) -> Vec<Vec<usize>> {
    let others = rows_of(columns) - 1;
    let size = (others + 1).div_ceil(2);
    let sets: Vec<u64> = (0..1 << others)
        .filter(|set: &u64| set.count_ones() == size)
        .collect();
    // The columns are spread over all sets. In their order of size, the first sets are those of the
    // first rows, which would contain almost all columns.
    let chosen: Vec<u64> = (0..columns)
        .map(|column| sets[column * sets.len() / columns])
        .collect();
    let row = |row: u32| -> Vec<usize> {
        let in_row = |&column: &usize| chosen[column] >> row & 1 == 1;
        (0..columns).filter(in_row).collect()
    };
    std::iter::once(vec![])
        .chain((0..others).map(row))
        .collect()
}

/// Returns the smallest number of rows of an array with `columns` columns.
fn rows_of(columns: usize) -> u32 {
    let mut rows = 1_u32;
    while binomial(rows - 1, rows.div_ceil(2)) < columns as u64 {
        rows += 1;
    }
    rows
}

/// Returns the number of subsets of size `k` of a set of size `n`.
fn binomial(n: u32, k: u32) -> u64 {
    match k <= n {
        true => (0..u64::from(k)).fold(1, |product, at| product * (u64::from(n) - at) / (at + 1)),
        false => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_two_columns_show_all_four_combinations() {
        for columns in 2..=200 {
            let rows = rows(columns);
            let is_one = |row: &[usize], column| row.binary_search(&column).is_ok();
            for second in 1..columns {
                for first in 0..second {
                    let mut shown = [false; 4];
                    for row in &rows {
                        let of = |column| usize::from(is_one(row, column));
                        shown[2 * of(first) + of(second)] = true;
                    }
                    assert_eq!(shown, [true; 4], "{first} and {second} of {columns}");
                }
            }
        }
    }

    /// Checks the numbers of rows that docs/ci.md promises, on both sides of each step.
    #[test]
    fn the_number_of_rows_is_the_smallest_possible() {
        for (columns, expected) in [
            (0, 1),
            (1, 2),
            (2, 4),
            (3, 4),
            (4, 5),
            (5, 6),
            (10, 6),
            (11, 7),
            (15, 7),
            (16, 8),
            (35, 8),
            (36, 9),
            (56, 9),
            (57, 10),
            (100, 10),
            (126, 10),
            (127, 11),
            (200, 11),
            (1000, 14),
            (10_000, 17),
        ] {
            let rows = rows(columns);
            assert_eq!(rows.len(), expected, "{columns} columns");
            assert!(rows[0].is_empty() && rows.iter().all(|row| row.is_sorted()));
        }
    }

    #[test]
    fn the_rows_share_the_columns_about_equally() {
        for columns in [20, 57, 100, 200, 1000] {
            for row in &rows(columns)[1..] {
                let share = row.len() as f64 / columns as f64;
                assert!((0.4..=0.8).contains(&share), "{share} of {columns}");
            }
        }
    }

    #[test]
    fn binomial_coefficients_are_those_of_pascal() {
        for n in 1..40 {
            for k in 1..=n {
                assert_eq!(binomial(n, k), binomial(n - 1, k - 1) + binomial(n - 1, k));
            }
            assert_eq!((binomial(n, 0), binomial(n, n + 1)), (1, 0));
        }
    }
}
