//! Sums over pairs of elements that neither overflow nor underflow.

use super::Difference;

/// A sum as a number times a power of two: squares of what an `f64` holds need twice its exponents.
#[derive(Clone, Copy, Debug, Default)]
struct Scaled {
    number: f64,
    exponent: i32,
}

impl Scaled {
    fn add(&mut self, other: Self) {
        if self.number == 0.0 || other.number == 0.0 {
            *self = if self.number == 0.0 { other } else { *self };
            return;
        }
        let exponent = self.exponent.max(other.exponent);
        let number = times_power(self.number, self.exponent - exponent) + times_power(other.number, other.exponent - exponent);
        *self = Self { number, exponent };
    }

    /// The root of `self / other`.
    fn root_of_ratio(self, other: Self) -> f64 {
        times_power((self.number / other.number).sqrt(), (self.exponent - other.exponent) / 2)
    }

    fn log10(self) -> f64 {
        self.number.log10() + f64::from(self.exponent) * std::f64::consts::LOG10_2
    }
}

/// `number * 2^exponent`, in steps that an `f64` holds.
fn times_power(number: f64, exponent: i32) -> f64 {
    let step = exponent.clamp(-1000, 1000);
    let scaled = number * 2f64.powi(step);
    if step == exponent || scaled == 0.0 || scaled.is_infinite() { scaled } else { times_power(scaled, exponent - step) }
}

/// The exponent of the largest magnitude: elements divided by its power of two are below 2.
fn exponent(numbers: &[f64]) -> i32 {
    let largest = numbers.iter().fold(0f64, |largest, number| largest.max(number.abs()));
    if largest == 0.0 { 0 } else { largest.log2().floor() as i32 }
}

fn scale(numbers: &mut [f64], exponent: i32) {
    if exponent != 0 {
        numbers.iter_mut().for_each(|number| *number = times_power(*number, -exponent));
    }
}

/// A window's numbers, both sides of the pairs that are finite.
#[derive(Default)]
pub struct Finite {
    sides: [Vec<f64>; 2],
    /// The first less the second, halved where it could overflow.
    differences: Vec<f64>,
    halved: bool,
}

/// Sums over pairs of elements.
#[derive(Debug, Default)]
pub struct Sums {
    max_error: f64,
    noise: Scaled,
    squares: [Scaled; 2],
    product: Scaled,
    special: u64,
    /// Elements that are not the same, however little they differ.
    differing: u64,
}

impl Sums {
    /// Adds pairs of floating-point numbers.
    pub fn add_floats(&mut self, [left, right]: &[Vec<f64>; 2]) {
        let is_large = |number: &f64| number.is_finite() && number.abs() >= 2f64.powi(1022);
        let mut finite = Finite { halved: left.iter().chain(right).any(is_large), ..Finite::default() };
        for (&a, &b) in left.iter().zip(right) {
            let differs = a != b && !(a.is_nan() && b.is_nan());
            self.differing += u64::from(differs);
            if !(a.is_finite() && b.is_finite()) {
                self.special += u64::from(differs);
                continue;
            }
            self.max_error = self.max_error.max((a - b).abs());
            finite.sides[0].push(a);
            finite.sides[1].push(b);
            finite.differences.push(if finite.halved { a / 2.0 - b / 2.0 } else { a - b });
        }
        self.add(finite);
    }

    /// Adds pairs of integers, whose differences are exact.
    pub fn add_integers(&mut self, [left, right]: &[Vec<i128>; 2]) {
        let mut finite = Finite::default();
        for (&a, &b) in left.iter().zip(right) {
            self.differing += u64::from(a != b);
            let difference = (a - b) as f64;
            self.max_error = self.max_error.max(difference.abs());
            finite.sides[0].push(a as f64);
            finite.sides[1].push(b as f64);
            finite.differences.push(difference);
        }
        self.add(finite);
    }

    /// Adds pairs of an integer and a floating-point number, which are equal if the number is that integer.
    pub fn add_mixed(&mut self, integers: &[i128], floats: &[f64], integers_first: bool) {
        let rounded: Vec<f64> = integers.iter().map(|&integer| integer as f64).collect();
        let is_lost = |(&integer, &float): (&i128, &f64)| integer as f64 == float && float as i128 != integer;
        self.differing += integers.iter().zip(floats).filter(|&pair| is_lost(pair)).count() as u64;
        let floats = floats.to_vec();
        self.add_floats(&if integers_first { [rounded, floats] } else { [floats, rounded] });
    }

    fn add(&mut self, Finite { mut sides, mut differences, halved }: Finite) {
        let exponents = sides.each_mut().map(|side| {
            let exponent = exponent(side);
            scale(side, exponent);
            exponent
        });
        let of_differences = exponent(&differences);
        scale(&mut differences, of_differences);
        let squares = |numbers: &[f64]| numbers.iter().map(|number| number * number).sum::<f64>();
        for ((sum, side), exponent) in self.squares.iter_mut().zip(&sides).zip(exponents) {
            sum.add(Scaled { number: squares(side), exponent: 2 * exponent });
        }
        self.noise.add(Scaled { number: squares(&differences), exponent: 2 * (of_differences + i32::from(halved)) });
        let product = sides[0].iter().zip(&sides[1]).map(|(a, b)| a * b).sum();
        self.product.add(Scaled { number: product, exponent: exponents[0] + exponents[1] });
    }

    /// What they say.
    pub fn difference(&self) -> Difference {
        let [signal, other] = self.squares;
        let cosine = match (signal.number == 0.0, other.number == 0.0) {
            // Two zero vectors are the same; a zero one beside another has no direction.
            (true, true) => 1.0,
            (true, false) | (false, true) => 0.0,
            _ => {
                let number = self.product.number / (signal.number.sqrt() * other.number.sqrt());
                times_power(number, self.product.exponent - (signal.exponent + other.exponent) / 2)
            }
        };
        let (relative, snr_db) = match (self.noise.number == 0.0, signal.number == 0.0) {
            (true, _) if self.differing > self.special => (f64::MIN_POSITIVE, f64::INFINITY),
            (true, _) => (0.0, f64::INFINITY),
            (false, true) => (f64::INFINITY, f64::NEG_INFINITY),
            // However far below an `f64`'s least, what differs is not 0.
            _ => (self.noise.root_of_ratio(signal).max(f64::MIN_POSITIVE), -10.0 * (self.noise.log10() - signal.log10())),
        };
        Difference { equal: self.differing == 0, max_error: self.max_error, relative, snr_db, cosine, special: self.special }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn floats(left: &[f64], right: &[f64]) -> Difference {
        let mut sums = Sums::default();
        sums.add_floats(&[left.into(), right.into()]);
        sums.difference()
    }

    fn near(found: f64, expected: f64) -> bool {
        (found - expected).abs() <= 1e-12 * expected.abs()
    }

    #[test]
    fn neither_large_nor_small_numbers_are_lost() {
        let small = floats(&[1e-170, 1.0], &[2e-170, 1.0]);
        assert!(!small.equal && small.max_error == 1e-170 && near(small.relative, 1e-170) && near(small.cosine, 1.0), "{small:?}");
        let large = floats(&[1e200, 1.0], &[1.1e200, 1.0]);
        assert!(near(large.relative, 0.1) && near(large.cosine, 1.0) && near(large.snr_db, 20.0), "{large:?}");
        let largest = floats(&[f64::MAX], &[-f64::MAX]);
        assert!(near(largest.relative, 2.0) && near(largest.cosine, -1.0), "{largest:?}");
        let least = floats(&[5e-324], &[0.0]);
        assert!(!least.equal && near(least.relative, 1.0) && least.cosine == 0.0, "{least:?}");
        let apart = floats(&[1e200, 0.0], &[1e-200, 1e-200]);
        assert!(near(apart.cosine, 0.5f64.sqrt()), "{apart:?}");
        let mut windows = Sums::default();
        windows.add_floats(&[vec![1e-200], vec![2e-200]]);
        windows.add_floats(&[vec![1e200], vec![1e200]]);
        assert!(windows.difference().relative <= f64::MIN_POSITIVE && !windows.difference().equal);
    }

    #[test]
    fn integers_are_held_against_each_other_exactly() {
        let mut sums = Sums::default();
        sums.add_integers(&[vec![1 << 53, 7], vec![(1 << 53) + 1, 7]]);
        let difference = sums.difference();
        assert!(!difference.equal && difference.max_error == 1.0 && difference.relative > 0.0, "{difference:?}");
    }

    #[test]
    fn what_differs_has_an_error_and_is_not_equal() {
        let far = floats(&[1e300, 1e-300], &[1e300, 2e-300]);
        assert!(!far.equal && far.relative > 0.0, "{far:?}");
        let mut sums = Sums::default();
        sums.add_mixed(&[(1 << 53) + 1, 7], &[2f64.powi(53), 7.0], true);
        let mixed = sums.difference();
        assert!(!mixed.equal && mixed.relative > 0.0, "{mixed:?}");
        let mut sums = Sums::default();
        sums.add_mixed(&[1 << 60, -7], &[2f64.powi(60), -7.0], false);
        assert!(sums.difference().equal);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// Equal means equal, errors are those of the definition where that neither overflows nor underflows, and a factor does not change them.
        #[test]
        fn errors_are_those_of_the_definition(pairs in prop::collection::vec((-1e3f64..1e3, -1e3f64..1e3), 1..40), power in -1000i32..1000) {
            let (left, right): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
            prop_assert!(floats(&left, &left).equal);
            let found = floats(&left, &right);
            let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
            let noise = squares(&mut left.iter().zip(&right).map(|(a, b)| a - b));
            let relative = (noise / squares(&mut left.iter().copied())).sqrt();
            prop_assert!(near(found.relative, relative) && found.equal == (left == right), "{found:?}, expected {relative}");
            let scaled = |numbers: &[f64]| numbers.iter().map(|number| times_power(*number, power)).collect::<Vec<_>>();
            let again = floats(&scaled(&left), &scaled(&right));
            prop_assert!(power < -900 || near(again.relative, relative), "{again:?}, expected {relative}");
        }
    }
}
