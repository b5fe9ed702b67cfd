// SPDX-License-Identifier: Apache-2.0
//! Groups of rows that differ only in their scale. Their costs must not depend on it.

use super::costs::Cost;

/// The permitted ratio of the largest cost to the smallest one, in percent.
const FLAT: u64 = 120;

/// Rows whose cost for each unit must be the same.
pub struct Group {
    /// The name of a unit.
    unit: &'static str,
    /// A row with few units. Its cost and its units are subtracted from those of the others.
    base: Option<(&'static str, u64)>,
    /// Names of rows, with their units.
    rows: &'static [(&'static str, u64)],
    cost: fn(Cost) -> u64,
}

pub const GROUPS: &[Group] = &[
    Group {
        unit: "a key by pattern",
        base: Some(("1 key by pattern, summary", 1)),
        rows: &[
            ("10 keys by pattern, summary", 10),
            ("100 keys by pattern, summary", 100),
            ("1,000 keys by pattern, summary", 1000),
            ("10,000 keys by pattern, summary", 10_000),
            ("65,000 keys by pattern, summary", 65_000),
        ],
        cost: |cost| cost.executor,
    },
    Group {
        unit: "a key by name",
        base: Some(("1 key, 1 site", 1)),
        rows: &[
            ("100 keys by name", 100),
            ("1,000 keys by name", 1000),
            ("10,000 keys by name", 10_000),
        ],
        cost: Cost::whole,
    },
    Group {
        unit: "a site of a key",
        base: Some(("1 key, 1 site", 1)),
        rows: &[
            ("1 key, 56 sites", 56),
            ("1 key, 1,000 sites", 1000),
            ("1 key, 10,000 sites", 10_000),
            ("1 key, 100,000 sites", 100_000),
        ],
        cost: |cost| cost.executor,
    },
    Group {
        unit: "a claim",
        base: Some(("1 claim", 1)),
        rows: &[
            ("100 claims", 100),
            ("1,000 claims", 1000),
            ("4,000 claims", 4000),
        ],
        cost: Cost::whole,
    },
    Group {
        unit: "1 key of a table",
        base: None,
        rows: &[
            ("1 of 1,000 keys", 1),
            ("1 of 10,000 keys", 1),
            ("1 of 100,000 keys", 1),
        ],
        cost: |cost| cost.executor,
    },
    Group {
        unit: "100 keys of a table",
        base: None,
        rows: &[
            ("100 of 1,000 keys by name", 1),
            ("100 of 10,000 keys by name", 1),
            ("100 of 100,000 keys by name", 1),
        ],
        cost: |cost| cost.executor,
    },
];

impl Group {
    /// Returns whether the group needs this row.
    pub fn has(&self, name: &str) -> bool {
        let mut rows = self.base.iter().chain(self.rows);
        rows.any(|(known, _)| *known == name)
    }

    /// Returns the cost of a unit in each row that was counted, with the row's name.
    fn units(&self, costs: &[(&str, Cost)]) -> Vec<(&'static str, u64)> {
        let cost = |name: &str| {
            let found = costs.iter().find(|(known, _)| *known == name);
            found.map(|(_, cost)| (self.cost)(*cost))
        };
        let base = match self.base {
            Some((name, units)) => cost(name).map(|cost| (cost, units)),
            None => Some((0, 0)),
        };
        let Some(base) = base else {
            return Vec::new();
        };
        let unit = |(name, units): &(&'static str, u64)| {
            let above = cost(name)?.saturating_sub(base.0);
            Some((*name, above / (units - base.1)))
        };
        self.rows.iter().filter_map(unit).collect()
    }

    /// Describes the difference if the cost of a unit depends on the scale.
    pub fn fault(&self, costs: &[(&str, Cost)]) -> Option<String> {
        let units = self.units(costs);
        let numbers = || units.iter().map(|(_, cost)| *cost);
        let (least, most) = (numbers().min()?, numbers().max()?);
        let is_flat = least > 0 && most * 100 <= least * FLAT;
        (!is_flat).then(|| {
            let rows = units.iter().map(|(name, cost)| format!("{name}: {cost}"));
            let rows: Vec<String> = rows.collect();
            format!(
                "the cost of {} grows with the scale; {}",
                self.unit,
                rows.join("; ")
            )
        })
    }
}

/// Formats the cost of a unit in each row as a table.
pub fn table(costs: &[(&str, Cost)]) -> String {
    let lines = GROUPS.iter().map(|group| {
        let units = group.units(costs).into_iter();
        let units: Vec<String> = units.map(|(_, unit)| unit.to_string()).collect();
        format!("| {} | {} |\n", group.unit, units.join(", "))
    });
    let head = "| instructions per | from the smallest to the largest row |\n|---|---|\n";
    head.to_owned() + &lines.collect::<String>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::ROWS;

    fn of(executor: u64) -> Cost {
        Cost {
            client: 0,
            api: 0,
            executor,
            window: 0,
        }
    }

    #[test]
    fn a_cost_that_grows_with_the_scale_is_a_fault() {
        let group = Group {
            unit: "a key",
            base: Some(("one", 1)),
            rows: &[("ten", 10), ("many", 101)],
            cost: |cost| cost.executor,
        };
        let costs = |many| [("one", of(1000)), ("ten", of(1900)), ("many", of(many))];
        // 100 for each further key, and 1,000 for everything else.
        let units = group.units(&costs(11_000));
        assert_eq!(units, [("ten", 100), ("many", 100)]);
        assert_eq!(group.fault(&costs(13_000)), None);
        let fault = group.fault(&costs(13_100)).expect("21 % more");
        assert!(fault.contains("ten: 100; many: 121"), "{fault}");
        assert!(group.fault(&costs(9_000)).is_some(), "a fifth less");
    }

    #[test]
    fn the_test_counts_the_base_and_two_rows_of_each_group() {
        for group in GROUPS {
            let rows = group.rows.iter().chain(&group.base);
            for (name, _) in rows {
                let is_known = ROWS.iter().any(|row| row.name == *name);
                assert!(is_known, "{}: there is no row {name}", group.unit);
            }
            let is_tested = |name: &str| ROWS.iter().any(|row| row.name == name && row.is_tested());
            let tested = group.rows.iter().filter(|(name, _)| is_tested(name));
            let has_base = group.base.is_none_or(|(name, _)| is_tested(name));
            assert!(
                has_base && tested.count() >= 2,
                "{} is not tested",
                group.unit
            );
        }
    }
}
