//! Medians, percentiles and the uncertainty of a median.

/// A median with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Interval {
    /// The median.
    pub median: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end of the 95 % interval.
    pub high: f64,
}

/// Resamples of the bootstrap: enough for two digits of the interval's ends.
const RESAMPLES: usize = 2000;

/// Median of `values` and its 95 % interval by the percentile bootstrap (Efron 1979), with a fixed
/// stream of random numbers so that a report can be recomputed. `None` without values.
pub fn median_interval(values: &[f64]) -> Option<Interval> {
    let median = percentile(values, 50.0)?;
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut resample = vec![0.0; values.len()];
    let mut medians = Vec::with_capacity(RESAMPLES);
    for _ in 0..RESAMPLES {
        for slot in &mut resample {
            // xorshift64 (Marsaglia 2003)
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *slot = values[(state % values.len() as u64) as usize];
        }
        medians.extend(percentile(&resample, 50.0));
    }
    Some(Interval { median, low: percentile(&medians, 2.5)?, high: percentile(&medians, 97.5)? })
}

/// The `percent`-th percentile, interpolated between neighbours. `None` without values.
pub fn percentile(values: &[f64], percent: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let place = percent / 100.0 * sorted.len().checked_sub(1)? as f64;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    Some(below + (above - below) * place.fract())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_interpolate() {
        assert_eq!(percentile(&[], 50.0), None);
        assert_eq!(percentile(&[3.0], 99.0), Some(3.0));
        assert_eq!(percentile(&[4.0, 1.0, 2.0, 3.0], 50.0), Some(2.5));
        assert_eq!(percentile(&[0.0, 10.0], 99.0), Some(9.9));
    }

    #[test]
    fn interval_holds_the_median_and_narrows_with_more_values() {
        let values = |n: usize| (0..n).map(|i| (i * 7919 % 1000) as f64).collect::<Vec<f64>>();
        let few = median_interval(&values(10)).expect("values");
        let many = median_interval(&values(1000)).expect("values");
        for interval in [few, many] {
            assert!(interval.low <= interval.median && interval.median <= interval.high);
        }
        assert!(many.high - many.low < (few.high - few.low) / 3.0, "{few:?} {many:?}");
    }

    #[test]
    fn interval_covers_the_true_median_about_as_often_as_it_says() {
        // 200 samples of 25 uniform numbers, true median 0.5.
        let mut state = 1u64;
        let mut covered = 0;
        for _ in 0..200 {
            let sample: Vec<f64> = (0..25)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 11) as f64 / (1u64 << 53) as f64
                })
                .collect();
            let interval = median_interval(&sample).expect("values");
            covered += usize::from(interval.low <= 0.5 && 0.5 <= interval.high);
        }
        assert!((175..=200).contains(&covered), "{covered} of 200");
    }
}
