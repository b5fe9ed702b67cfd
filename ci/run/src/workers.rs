// SPDX-License-Identifier: Apache-2.0
//! Shares work among workers that run at once.

use std::collections::BTreeMap;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

/// Gives each item to the next worker that is free, and passes the results on in the order of the
/// items. All futures belong to this one, so none outlives it.
///
/// # Errors
/// The first error of a worker. The work of the others is dropped. The results that were known
/// before it were passed on.
pub async fn in_order<W, I, T, E>(
    workers: impl IntoIterator<Item = W>,
    items: impl IntoIterator<Item = I>,
    work: impl AsyncFn(&mut W, I) -> Result<T, E>,
    mut take: impl FnMut(T),
) -> Result<(), E> {
    let mut idle: Vec<W> = workers.into_iter().collect();
    let mut items = items.into_iter().enumerate().peekable();
    let mut running = FuturesUnordered::new();
    // Results whose predecessors are not known yet.
    let mut early = BTreeMap::new();
    let mut next = 0;
    loop {
        while items.peek().is_some()
            && let Some(mut worker) = idle.pop()
            && let Some((number, item)) = items.next()
        {
            let work = &work;
            running.push(async move {
                let result = work(&mut worker, item).await;
                (worker, number, result)
            });
        }
        let Some((worker, number, result)) = running.next().await else {
            return Ok(());
        };
        idle.push(worker);
        match result {
            Ok(result) => early.insert(number, result),
            Err(error) => {
                early.into_values().for_each(take);
                return Err(error);
            }
        };
        while let Some(result) = early.remove(&next) {
            take(result);
            next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use anyhow::bail;
    use tokio::sync::oneshot;

    use super::*;

    /// Counts the futures that run at once.
    #[derive(Default)]
    struct Running {
        now: Cell<usize>,
        most: Cell<usize>,
    }

    impl Running {
        fn enter(&self) -> Entered<'_> {
            self.now.set(self.now.get() + 1);
            self.most.set(self.most.get().max(self.now.get()));
            Entered(self)
        }
    }

    struct Entered<'a>(&'a Running);

    impl Drop for Entered<'_> {
        fn drop(&mut self) {
            self.0.now.set(self.0.now.get() - 1);
        }
    }

    /// The first item ends after all the others, so the second worker does these.
    #[tokio::test]
    async fn a_slow_item_delays_no_work_and_keeps_its_place() {
        let (running, done) = (Running::default(), RefCell::new(vec![]));
        let (last_is_done, last) = oneshot::channel();
        let (last_is_done, last) = (Cell::new(Some(last_is_done)), Cell::new(Some(last)));
        let work = async |worker: &mut &mut u32, item: u32| {
            let _entered = running.enter();
            **worker += 1;
            match item {
                0 => last.take().expect("once").await?,
                5 => last_is_done
                    .take()
                    .expect("once")
                    .send(())
                    .expect("waiting"),
                _ => tokio::task::yield_now().await,
            }
            done.borrow_mut().push(item);
            anyhow::Ok(item)
        };
        let (mut workers, mut taken) = ([0, 0], vec![]);
        let end = in_order(&mut workers, 0..6, work, |item| taken.push(item));
        end.await.unwrap();
        assert_eq!(done.take(), [1, 2, 3, 4, 5, 0]);
        assert_eq!(taken, [0, 1, 2, 3, 4, 5]);
        workers.sort_unstable();
        assert_eq!((workers, running.most.get()), ([1, 5], 2));
    }

    #[tokio::test]
    async fn an_error_ends_all_work() {
        let (running, started) = (Running::default(), Cell::new(0));
        let mut taken = vec![];
        let work = async |_: &mut (), item: u32| {
            let _entered = running.enter();
            started.set(started.get() + 1);
            match item {
                0 => Ok(item),
                2 => bail!("no guest"),
                _ => std::future::pending().await,
            }
        };
        let end = in_order([(); 3], 0..100, work, |item| taken.push(item)).await;
        assert_eq!(end.unwrap_err().to_string(), "no guest");
        assert_eq!((running.now.get(), taken), (0, vec![0]));
        assert!(started.get() < 100, "{}", started.get());
    }

    /// The first item never ends, so the second worker does the others until one fails.
    #[tokio::test]
    async fn results_after_an_unfinished_one_are_kept_after_an_error() {
        let mut taken = vec![];
        let work = async |_: &mut (), item: u32| match item {
            0 => std::future::pending().await,
            3 => bail!("no guest"),
            _ => Ok(item),
        };
        let end = in_order([(); 2], 0..9, work, |item| taken.push(item)).await;
        assert_eq!(end.unwrap_err().to_string(), "no guest");
        assert_eq!(taken, [1, 2]);
    }

    #[tokio::test]
    async fn one_worker_works_in_order_and_more_workers_than_items_are_idle() {
        for workers in [1, 9] {
            let running = Running::default();
            let mut taken = vec![];
            let work = async |_: &mut (), item: u32| {
                let _entered = running.enter();
                tokio::task::yield_now().await;
                anyhow::Ok(item)
            };
            let end = in_order(vec![(); workers], 0..4, work, |item| taken.push(item));
            end.await.unwrap();
            assert_eq!(
                (taken, running.most.get()),
                (vec![0, 1, 2, 3], workers.min(4))
            );
        }
    }
}
