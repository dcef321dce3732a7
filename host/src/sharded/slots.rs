//! Which memory each gathered weight takes: decided once, before the first pass.
//!
//! A weight is gathered while those before it are used. Its slot is in use from the take of the weight `distance` positions before it, when its gather is issued, until
//! its own release, before the take of the next one. So any `distance + 1` neighbours are in memory at once, and have different slots. A pass begins when the one before
//! it has released all weights: passes share the slots.

use std::collections::BTreeSet;

use super::layout::ALIGNMENT;
use crate::runtime::{Error, Result};

/// The slot of memory of each position of each pass, the same in every step and every replay.
///
/// ```
/// use oxtile::sharded::SlotPlan;
///
/// // Large and small weights take turns: forward, and backward in reverse.
/// let plan = SlotPlan::new(&[&[4096, 512, 4096, 512], &[512, 4096, 512, 4096]], 1, None, |_, position| format!("w{position}"))?;
/// assert_eq!(plan.slots(), [4096, 512]);
/// assert_eq!([0, 1, 2, 3].map(|position| plan.slot(0, position)), [0, 1, 0, 1]);
/// assert_eq!([0, 1, 2, 3].map(|position| plan.slot(1, position)), [1, 0, 1, 0]);
/// # Ok::<(), oxtile::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotPlan {
    /// The bytes of each slot, the largest first.
    slots: Vec<u64>,
    /// For each pass the slot of each position.
    places: Vec<Vec<usize>>,
    distance: u32,
}

impl SlotPlan {
    /// Plans passes, each the bytes of its weights in the order in which they are taken. `distance` is how many gathers run ahead of the weight that is used; with 0 a
    /// weight is gathered when it is taken, and there is one slot. `cap` bounds the bytes of all slots. `name` names the weight at a position of a pass in errors.
    ///
    /// Of two assignments the one with fewer bytes is taken: slots in turn, or the largest weights first, each to the smallest slot that is free then.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the slots take more than `cap` bytes, with the largest distance that fits: the smallest is always 0, if any fits, and hides no gather; or if the weights together pass 2^64 bytes.
    pub fn new(passes: &[&[u64]], distance: u32, cap: Option<u64>, name: impl Fn(usize, usize) -> String) -> Result<Self> {
        let sizes =
            rounded(passes).ok_or_else(|| invalid("the weights together take more than 2^64 bytes: check their sizes".to_owned()))?;
        let plan = Self::smallest(&sizes, distance);
        match cap {
            Some(cap) if plan.bytes() > cap => Err(invalid(plan.refusal(&sizes, cap, name))),
            _ => Ok(plan),
        }
    }

    /// The bytes of each slot, multiples of 256, the largest first.
    pub fn slots(&self) -> &[u64] {
        &self.slots
    }

    /// The slot of a position of a pass.
    ///
    /// # Panics
    /// If there is no such pass or position.
    pub fn slot(&self, pass: usize, position: usize) -> usize {
        self.places[pass][position]
    }

    /// The bytes of all slots.
    pub fn bytes(&self) -> u64 {
        self.slots.iter().sum()
    }

    /// How many gathers run ahead of the weight that is used.
    pub fn distance(&self) -> u32 {
        self.distance
    }

    /// The better of both assignments; slots in turn where they are alike.
    fn smallest(sizes: &[Vec<u64>], distance: u32) -> Self {
        let reach = usize::try_from(distance).unwrap_or(usize::MAX);
        let plan = |assign: fn(&[u64], usize) -> Vec<usize>| {
            let passes = sizes.iter().map(|sizes| Slots::new(sizes, assign(sizes, reach)));
            Self::merged(passes.collect(), distance)
        };
        let (in_turn, by_size) = (plan(in_turn), plan(by_size));
        if by_size.bytes() < in_turn.bytes() { by_size } else { in_turn }
    }

    /// The passes' slots by rank of size: each is as large as the largest of its rank.
    fn merged(passes: Vec<Slots>, distance: u32) -> Self {
        let most = passes.iter().map(|pass| pass.sizes.len()).max().unwrap_or(0);
        let largest = |rank| passes.iter().filter_map(|pass| pass.sizes.get(rank).copied()).max().unwrap_or(0);
        Self { slots: (0..most).map(largest).collect(), places: passes.into_iter().map(|pass| pass.places).collect(), distance }
    }

    /// What is too large, and what fits.
    fn refusal(&self, sizes: &[Vec<u64>], cap: u64, name: impl Fn(usize, usize) -> String) -> String {
        let (needed, distance) = (self.bytes(), self.distance);
        let longest = sizes.iter().map(Vec::len).max().unwrap_or(0);
        // No two weights are further apart.
        let furthest = distance.min(u32::try_from(longest).unwrap_or(u32::MAX));
        let smaller = (0..furthest).rev().filter(|&distance| least_bytes(sizes, distance) <= cap);
        let fitting = smaller.map(|distance| Self::smallest(sizes, distance)).find(|plan| plan.bytes() <= cap);
        let mend = match fitting {
            Some(plan) if plan.distance > 0 => format!("distance {} fits ({} bytes)", plan.distance, plan.bytes()),
            Some(plan) => {
                let next = Self::smallest(sizes, 1).bytes();
                format!(
                    "distance 0 fits ({} bytes), which gathers each weight when it is taken; distance 1 takes {next}{}",
                    plan.bytes(),
                    neighbours(sizes, &name)
                )
            }
            None => {
                let [none, one] = [0, 1].map(|distance| Self::smallest(sizes, distance).bytes());
                format!("no distance fits, distance 1 takes {one}{}; distance 0 takes {none}: raise the cap", neighbours(sizes, &name))
            }
        };
        format!("at distance {distance} the slots of gathered weights take {needed} bytes, more than the cap of {cap}: {mend}")
    }
}

/// The slots of one pass, the largest first.
struct Slots {
    sizes: Vec<u64>,
    /// The slot of each position.
    places: Vec<usize>,
}

impl Slots {
    /// Orders the slots of an assignment by size.
    fn new(weights: &[u64], places: Vec<usize>) -> Self {
        let mut sizes = vec![0; places.iter().max().map_or(0, |last| last + 1)];
        for (&slot, &bytes) in places.iter().zip(weights) {
            sizes[slot] = bytes.max(sizes[slot]);
        }
        let mut order: Vec<usize> = (0..sizes.len()).collect();
        order.sort_by_key(|&slot| std::cmp::Reverse(sizes[slot]));
        let mut ranks = vec![0; order.len()];
        for (rank, &slot) in order.iter().enumerate() {
            ranks[slot] = rank;
        }
        Self { sizes: order.iter().map(|&slot| sizes[slot]).collect(), places: places.into_iter().map(|slot| ranks[slot]).collect() }
    }
}

/// The slots in turn.
fn in_turn(sizes: &[u64], reach: usize) -> Vec<usize> {
    let count = reach.saturating_add(1);
    (0..sizes.len()).map(|position| position % count).collect()
}

/// The largest weights first, each to the smallest slot in which no weight is within `reach` positions, else to a new one.
fn by_size(sizes: &[u64], reach: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&position| std::cmp::Reverse(sizes[position]));
    let mut places = vec![0; sizes.len()];
    // The positions in each slot. A slot is as large as its first weight, so the last slot is the smallest.
    let mut slots: Vec<BTreeSet<usize>> = Vec::new();
    for position in order {
        let near = position.saturating_sub(reach)..=position.saturating_add(reach);
        let free = slots.iter().rposition(|positions| positions.range(near.clone()).next().is_none());
        let slot = free.unwrap_or(slots.len());
        if slot == slots.len() {
            slots.push(BTreeSet::new());
        }
        slots[slot].insert(position);
        places[position] = slot;
    }
    places
}

/// The bytes that weights take at once in any assignment.
fn least_bytes(sizes: &[Vec<u64>], distance: u32) -> u64 {
    let count = usize::try_from(distance).unwrap_or(usize::MAX).saturating_add(1);
    let at_once = |sizes: &Vec<u64>| sizes.windows(count.min(sizes.len()).max(1)).map(|weights| weights.iter().sum()).max().unwrap_or(0);
    sizes.iter().map(at_once).max().unwrap_or(0)
}

/// Names the two neighbours with the most bytes.
fn neighbours(sizes: &[Vec<u64>], name: impl Fn(usize, usize) -> String) -> String {
    let pairs = sizes.iter().enumerate().flat_map(|(pass, sizes)| {
        sizes.windows(2).enumerate().map(move |(position, pair)| (pair[0] + pair[1], std::cmp::Reverse((pass, position))))
    });
    pairs.max().map_or(String::new(), |(_, std::cmp::Reverse((pass, position)))| {
        format!(", the most for `{}` and `{}`", name(pass, position), name(pass, position + 1))
    })
}

/// The bytes of each weight as slots have them; none if they pass 64 bits.
fn rounded(passes: &[&[u64]]) -> Option<Vec<Vec<u64>>> {
    let sizes = passes.iter().map(|sizes| sizes.iter().map(|bytes| bytes.checked_next_multiple_of(ALIGNMENT)).collect());
    let sizes: Vec<Vec<u64>> = sizes.collect::<Option<_>>()?;
    sizes.iter().flatten().try_fold(0u64, |sum, &bytes| sum.checked_add(bytes))?;
    Some(sizes)
}

fn invalid(why: String) -> Error {
    Error::Invalid { what: "SlotPlan", why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(passes: &[&[u64]], distance: u32) -> SlotPlan {
        SlotPlan::new(passes, distance, None, |pass, position| format!("w{pass}.{position}")).unwrap()
    }

    fn refusal(passes: &[&[u64]], distance: u32, cap: u64) -> String {
        SlotPlan::new(passes, distance, Some(cap), |pass, position| format!("w{pass}.{position}")).unwrap_err().to_string()
    }

    /// The bytes of slots in turn, computed from nothing but the rule.
    fn bytes_in_turn(passes: &[Vec<u64>], distance: u32) -> u64 {
        let mut merged: Vec<u64> = Vec::new();
        for sizes in passes {
            let mut slots = vec![0; distance as usize + 1];
            for (position, bytes) in sizes.iter().enumerate() {
                let slot = &mut slots[position % (distance as usize + 1)];
                *slot = bytes.div_ceil(256).max(*slot / 256) * 256;
            }
            slots.sort_by(|a, b| b.cmp(a));
            merged.resize(merged.len().max(slots.len()), 0);
            merged.iter_mut().zip(slots).for_each(|(all, one)| *all = one.max(*all));
        }
        merged.iter().sum()
    }

    /// Numbers below a bound, the same for a seed.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % bound
        }
    }

    #[test]
    fn every_plan_of_a_random_chain_holds() {
        let mut better = 0;
        for seed in 0..3000 {
            let mut random = Random(seed);
            let distance = random.below(5) as u32;
            let kinds = 1 + random.below(4);
            let passes: Vec<Vec<u64>> = (0..random.below(4))
                .map(|_| (0..random.below(14)).map(|_| random.below(kinds) * 700 + random.below(2)).collect())
                .collect();
            let views: Vec<&[u64]> = passes.iter().map(Vec::as_slice).collect();
            let made = plan(&views, distance);
            assert_eq!(made, plan(&views, distance), "seed {seed}: the same every time");
            assert_eq!((made.distance(), made.bytes()), (distance, made.slots().iter().sum()), "seed {seed}");
            assert!(made.slots().iter().all(|bytes| bytes.is_multiple_of(256)) && made.slots().is_sorted_by(|a, b| a >= b), "seed {seed}");
            for (pass, sizes) in passes.iter().enumerate() {
                for (position, &bytes) in sizes.iter().enumerate() {
                    assert!(made.slots()[made.slot(pass, position)] >= bytes, "seed {seed}: position {position} of pass {pass} fits");
                    for other in position + 1..sizes.len().min(position + distance as usize + 1) {
                        assert_ne!(made.slot(pass, position), made.slot(pass, other), "seed {seed}: {position} and {other} of pass {pass}");
                    }
                }
            }
            let in_turn = bytes_in_turn(&passes, distance);
            assert!(made.bytes() <= in_turn, "seed {seed}: {} bytes, {in_turn} in turn", made.bytes());
            better += u32::from(made.bytes() < in_turn);

            let cap = random.below(in_turn + 512);
            match SlotPlan::new(&views, distance, Some(cap), |_, _| String::new()) {
                Ok(capped) => assert!(capped == made && made.bytes() <= cap, "seed {seed}"),
                Err(error) => {
                    assert!(made.bytes() > cap, "seed {seed}");
                    let fits = (0..distance).rev().find(|&less| plan(&views, less).bytes() <= cap);
                    let said = fits.map_or("no distance fits".to_owned(), |less| format!("distance {less} fits"));
                    assert!(error.to_string().contains(&said), "seed {seed}: {said} is not in: {error}");
                }
            }
        }
        assert!(better > 100, "both assignments are tried");
    }

    #[test]
    fn equal_weights_take_one_slot_more_than_the_distance() {
        for (distance, count) in (0..6).flat_map(|distance| (0..12).map(move |count| (distance, count))) {
            let sizes = vec![1000; count];
            let made = plan(&[&sizes, &sizes], distance);
            assert_eq!(made.slots(), vec![1024; count.min(distance as usize + 1)], "{count} weights, distance {distance}");
        }
    }

    #[test]
    fn a_chain_by_hand() {
        // In turn both slots would hold a large weight: 0 and 3 lie in different ones.
        let made = plan(&[&[4096, 256, 256, 4096, 256, 256]], 1);
        assert_eq!(made.slots(), [4096, 256, 256]);
        let places: Vec<_> = (0..6).map(|position| made.slot(0, position)).collect();
        assert_eq!((places[0], places[3]), (0, 0));
        // Forward [8, 2], backward [4, 4]: the larger of the largest, and the larger of the others.
        let made = plan(&[&[8 * 256, 2 * 256], &[4 * 256, 4 * 256]], 1);
        assert_eq!(made.slots(), [8 * 256, 4 * 256]);
        assert_eq!(plan(&[&[1, 257, 0]], 0).slots(), [512], "gathered when taken");
        assert_eq!((plan(&[], 3).bytes(), plan(&[&[], &[]], 1).slots().len()), (0, 0));
        assert_eq!(plan(&[&[256, 512]], u32::MAX).slots(), [512, 256]);
    }

    #[test]
    fn a_cap_names_what_fits() {
        let sizes: &[u64] = &[1024, 512, 512, 256];
        assert_eq!(
            refusal(&[sizes], 2, 1700),
            "SlotPlan: at distance 2 the slots of gathered weights take 2048 bytes, more than the cap of 1700: distance 1 fits (1536 bytes)"
        );
        let said = refusal(&[sizes], 3, 1300);
        assert!(said.contains("distance 0 fits (1024 bytes), which gathers each weight when it is taken"), "{said}");
        assert!(said.ends_with("distance 1 takes 1536, the most for `w0.0` and `w0.1`"), "{said}");
        let said = refusal(&[&[256], sizes], 1, 1000);
        assert!(said.contains("no distance fits, distance 1 takes 1536, the most for `w1.0` and `w1.1`; "), "{said}");
        assert!(said.ends_with("distance 0 takes 1024: raise the cap"), "{said}");
        assert!(refusal(&[&[1024]], u32::MAX, 1).contains("no distance fits"), "a chain of one");
        assert!(SlotPlan::new(&[sizes], 2, Some(2048), |_, _| String::new()).is_ok());
        assert!(SlotPlan::new(&[&[u64::MAX]], 0, None, |_, _| String::new()).unwrap_err().to_string().contains("2^64"));
        assert!(SlotPlan::new(&[&[1 << 63, 1 << 63]], 0, None, |_, _| String::new()).is_err());
    }
}
