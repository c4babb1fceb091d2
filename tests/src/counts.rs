//! Two counts, compared: whether one is larger than chance makes it.

/// How often a comparison may be wrong: once in a million runs.
const ERROR: f64 = 1e-6;

/// So many of so many.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Share {
    /// Those that are counted.
    pub count: usize,
    /// All of them, at least as many.
    pub of: usize,
}

impl Share {
    /// Whether this share is larger than the other one, and not by chance: Fisher's exact test, one-sided.
    ///
    /// If each of all `n` is counted with the same unknown probability, and `k` are counted, then this share has `i` of
    /// them with the hypergeometric probability `C(k, i) C(n - k, of - i) / C(n, of)`. The sum for all `i` from `count`
    /// on is the chance of a share as large as this one.
    pub fn is_more_than(self, other: Self) -> bool {
        let counted = self.count + other.count;
        let all = self.of + other.of;
        let most = counted.min(self.of);
        let least = self.count.max(counted.saturating_sub(other.of));
        let ln_chance = |i| {
            ln_choose(counted, i) + ln_choose(all - counted, self.of - i) - ln_choose(all, self.of)
        };
        let chance: f64 = (least..=most).map(|i| ln_chance(i).exp()).sum();
        chance < ERROR
    }
}

/// The logarithm of the number of ways to choose `k` of `n`.
fn ln_choose(n: usize, k: usize) -> f64 {
    let ln_factorial = |n: usize| (2..=n).map(|i| (i as f64).ln()).sum::<f64>();
    ln_factorial(n) - ln_factorial(k) - ln_factorial(n - k)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Random;

    fn share(count: usize, of: usize) -> Share {
        Share { count, of }
    }

    #[test]
    fn what_chance_makes_is_not_more() {
        // One third of all are of this share, so twelve of twelve are by chance once in 3^12, which is half a million.
        assert!(!share(12, 200).is_more_than(share(0, 400)));
        assert!(share(14, 200).is_more_than(share(0, 400)));
        assert!(!share(0, 200).is_more_than(share(0, 400)));
        assert!(!share(60, 200).is_more_than(share(90, 400)));
        assert!(share(120, 200).is_more_than(share(90, 400)));
        assert!(!share(5, 200).is_more_than(share(390, 400)));
    }

    #[test]
    fn equal_probabilities_do_not_differ() {
        let mut random = Random::seeded(39);
        for one_in in [2, 5, 50] {
            for _ in 0..200 {
                let mut of = |of| share((0..of).filter(|_| random.one_in(one_in)).count(), of);
                let (one, other) = (of(200), of(400));
                assert!(!one.is_more_than(other), "{one:?} {other:?}");
            }
        }
    }
}
