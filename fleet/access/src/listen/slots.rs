// SPDX-License-Identifier: Apache-2.0
//! Manages slots for connections, limited in total and for each holder. Some are reserved for
//! privileged holders.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

/// A pool of slots. Clones share their slots.
#[derive(Clone, Debug)]
pub struct Slots<K> {
    /// The total number of slots.
    most: usize,
    /// The maximum number of slots of one holder.
    each: usize,
    /// The number of slots that only privileged holders can take.
    reserve: usize,
    taken: Arc<Mutex<Taken<K>>>,
}

#[derive(Debug)]
struct Taken<K> {
    all: usize,
    by_holder: HashMap<K, usize>,
}

/// The reason why no slot is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The holder has its maximum of slots.
    Holder(usize),
    /// All slots are taken.
    Pool(usize),
}

impl fmt::Display for Full {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Holder(most) => write!(f, "it has {most} connections, its maximum"),
            Self::Pool(most) => {
                write!(f, "{most} connections are open, the maximum")
            }
        }
    }
}

/// A slot, which is freed on drop.
#[derive(Debug)]
pub struct Slot<K: Eq + Hash> {
    holder: K,
    taken: Arc<Mutex<Taken<K>>>,
}

impl<K: Clone + Eq + Hash> Slots<K> {
    /// Creates a pool of `most` slots with at most `each` for one holder. Privileged holders are
    /// exempt from this limit, and only they can take the last `reserve` slots.
    #[must_use]
    pub fn new(most: usize, each: usize, reserve: usize) -> Self {
        let by_holder = HashMap::new();
        let taken = Arc::new(Mutex::new(Taken { all: 0, by_holder }));
        Self {
            most,
            each,
            reserve,
            taken,
        }
    }

    /// Takes a slot.
    ///
    /// # Errors
    /// [`Full`].
    pub fn take(&self, holder: K, is_privileged: bool) -> Result<Slot<K>, Full> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let held = taken.by_holder.get(&holder).copied().unwrap_or(0);
        let most = if is_privileged {
            self.most
        } else {
            self.most - self.reserve
        };
        if !is_privileged && held >= self.each {
            return Err(Full::Holder(self.each));
        }
        if taken.all >= most {
            return Err(Full::Pool(most));
        }
        taken.all += 1;
        taken.by_holder.insert(holder.clone(), held + 1);
        drop(taken);
        let taken = Arc::clone(&self.taken);
        Ok(Slot { holder, taken })
    }
}

impl<K: Eq + Hash> Drop for Slot<K> {
    fn drop(&mut self) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if let Some(held) = taken.by_holder.get_mut(&self.holder) {
            *held -= 1;
            if *held == 0 {
                taken.by_holder.remove(&self.holder);
            }
        }
    }
}

/// Returns the address, or the network of the address, that counts as the holder of slots. A site
/// usually has a whole IPv6 /64 network, so all addresses of such a network count as one holder.
#[must_use]
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::from([a, b, c, d, 0, 0, 0, 0])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_leaves_places_for_others() {
        let slots = Slots::new(4, 2, 1);
        let a: Vec<_> = (0..2).map(|_| slots.take("a", false)).collect();
        assert!(a.iter().all(Result::is_ok));
        assert_eq!(slots.take("a", false).err(), Some(Full::Holder(2)));
        let b = slots.take("b", false).expect("a slot");
        // The last slot is reserved for privileged holders.
        assert_eq!(slots.take("c", false).err(), Some(Full::Pool(3)));
        let root = slots.take("root", true).expect("the reserve");
        assert_eq!(slots.take("root", true).err(), Some(Full::Pool(4)));
        drop((a, b));
        let _more: Vec<_> = (0..3)
            .map(|_| slots.take("root", true).expect("no limit of its own"))
            .collect();
        drop(root);
        assert_eq!(slots.take("a", false).err(), Some(Full::Pool(3)));
    }

    #[test]
    fn a_holder_that_is_gone_is_forgotten() {
        let slots = Slots::new(8, 2, 0);
        for holder in 0..100 {
            drop(slots.take(holder, false));
        }
        let taken = slots.taken.lock().expect("free");
        assert_eq!((taken.all, taken.by_holder.len()), (0, 0));
    }

    #[test]
    fn addresses_of_one_network_are_one_holder() {
        let of = |text: &str| network(text.parse().expect("an address"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
