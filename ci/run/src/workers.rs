// SPDX-License-Identifier: Apache-2.0
//! Shares work among workers that run at once.

use std::collections::BTreeMap;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

/// Gives each item to the next worker that is free, and passes the results on in the order of the
/// items. All futures belong to this one, so none outlives it.
///
/// After an error no more work begins. If other workers still work, `stop` is called, which must
/// make them end soon.
///
/// # Errors
/// The errors of the workers, with the numbers of their items. All results were passed on.
pub async fn in_order<W, I, T, E>(
    workers: impl IntoIterator<Item = W>,
    items: impl IntoIterator<Item = I>,
    work: impl AsyncFn(&mut W, I) -> Result<T, E>,
    mut take: impl FnMut(T),
    stop: impl FnOnce(),
) -> Result<(), Vec<(usize, E)>> {
    let mut idle: Vec<W> = workers.into_iter().collect();
    let mut items = items.into_iter().enumerate().peekable();
    let mut running = FuturesUnordered::new();
    // Results whose predecessors are not known yet.
    let mut early = BTreeMap::new();
    let mut next = 0;
    let mut errors = vec![];
    let mut stop = Some(stop);
    loop {
        while errors.is_empty()
            && items.peek().is_some()
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
            break;
        };
        idle.push(worker);
        match result {
            Ok(result) => {
                early.insert(number, result);
            }
            Err(error) => {
                errors.push((number, error));
                if !running.is_empty()
                    && let Some(stop) = stop.take()
                {
                    stop();
                }
            }
        }
        while let Some(result) = early.remove(&next) {
            take(result);
            next += 1;
        }
    }
    early.into_values().for_each(take);
    match errors.is_empty() {
        true => Ok(()),
        false => Err(errors),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use anyhow::bail;
    use tokio::sync::oneshot;

    use super::*;
    use crate::interrupt::Halt;

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
        let take = |item| taken.push(item);
        let end = in_order(&mut workers, 0..6, work, take, || unreachable!());
        end.await.unwrap();
        assert_eq!(done.take(), [1, 2, 3, 4, 5, 0]);
        assert_eq!(taken, [0, 1, 2, 3, 4, 5]);
        workers.sort_unstable();
        assert_eq!((workers, running.most.get()), ([1, 5], 2));
    }

    #[tokio::test]
    async fn an_error_stops_all_work_and_every_error_is_returned() {
        let (running, started, halt) = (Running::default(), Cell::new(0), Halt::default());
        let mut taken = vec![];
        let work = async |_: &mut (), item: u32| {
            let _entered = running.enter();
            started.set(started.get() + 1);
            match item {
                0 => return Ok(item),
                2 => bail!("no guest"),
                _ => halt.requested().await,
            };
            bail!("stopped at {item}")
        };
        let take = |item| taken.push(item);
        let end = in_order([(); 3], 0..100, work, take, || halt.another_job_ended()).await;
        let errors = end.unwrap_err().into_iter();
        let errors: Vec<String> = errors.map(|(at, error)| format!("{at} {error}")).collect();
        assert_eq!(errors[0], "2 no guest");
        assert!(
            errors[1..].iter().any(|error| error == "1 stopped at 1"),
            "{errors:?}"
        );
        assert_eq!((running.now.get(), taken), (0, vec![0]));
        assert!(started.get() < 100, "{}", started.get());
    }

    /// The first item ends when it is stopped, so the second worker does the others until one
    /// fails.
    #[tokio::test]
    async fn results_after_an_unfinished_one_are_kept_after_an_error() {
        for first_fails in [true, false] {
            let (halt, mut taken) = (Halt::default(), vec![]);
            let work = async |_: &mut (), item: u32| match item {
                0 => {
                    halt.requested().await;
                    if first_fails {
                        bail!("stopped")
                    }
                    Ok(item)
                }
                3 => bail!("no guest"),
                _ => Ok(item),
            };
            let take = |item| taken.push(item);
            let end = in_order([(); 2], 0..9, work, take, || halt.another_job_ended()).await;
            let errors = end.unwrap_err();
            assert_eq!(errors[0].1.to_string(), "no guest");
            match first_fails {
                true => assert_eq!((errors.len(), taken), (2, vec![1, 2])),
                false => assert_eq!((errors.len(), taken), (1, vec![0, 1, 2])),
            }
        }
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
            let take = |item| taken.push(item);
            let end = in_order(vec![(); workers], 0..4, work, take, || unreachable!());
            end.await.unwrap();
            assert_eq!(
                (taken, running.most.get()),
                (vec![0, 1, 2, 3], workers.min(4))
            );
        }
    }
}
