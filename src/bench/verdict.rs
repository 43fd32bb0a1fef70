//! Which classes of a report gained and which lost. The table, the page and the comparison of two
//! reports all judge by this one rule.

use serde_json::Value;

/// Names by what their ratio says.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Verdict<'a> {
    /// The whole interval is above 1.
    pub faster: Vec<&'a str>,
    /// The whole interval is below 1.
    pub slower: Vec<&'a str>,
    /// The interval holds 1, or there is none.
    pub unclear: Vec<&'a str>,
}

impl<'a> Verdict<'a> {
    /// Judges `{median, low, high}` ratios.
    pub fn of(ratios: impl IntoIterator<Item = (&'a str, &'a Value)>) -> Self {
        let mut verdict = Self::default();
        for (name, ratio) in ratios {
            match (ratio["low"].as_f64(), ratio["high"].as_f64()) {
                (Some(low), Some(_)) if low > 1.0 => verdict.faster.push(name),
                (Some(_), Some(high)) if high < 1.0 => verdict.slower.push(name),
                _ => verdict.unclear.push(name),
            }
        }
        verdict
    }
}

/// Values below which no interval can be a 95 % one: all of six lie on one side of the true median
/// with probability 2 x 0.5^6 = 3 %, all of five with 6 %.
pub(super) const ENOUGH: u64 = 6;

/// Names that have fewer values than an interval needs.
pub(super) fn too_few<'a>(counts: impl IntoIterator<Item = (&'a str, &'a Value)>) -> Vec<&'a str> {
    let few = |count: &Value| count.as_u64().is_some_and(|count| count < ENOUGH);
    counts.into_iter().filter(|(_, count)| few(count)).map(|(name, _)| name).collect()
}

/// The line that warns of such names; empty if there are none.
pub(super) fn few_pairs<'a>(counts: impl IntoIterator<Item = (&'a str, &'a Value)>) -> String {
    let few = too_few(counts);
    match few.is_empty() {
        true => String::new(),
        false => format!(
            "NOTE: few pairs for {}; below {ENOUGH} an interval is narrower than 95 % and a verdict may \
             be chance; measure with a larger --runs\n",
            few.join(", ")
        ),
    }
}

/// Classes of a summary with what was measured in each, in the report's order.
pub(super) fn classes(summary: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let by_class = summary["by_class"].as_object();
    by_class.into_iter().flatten().map(|(class, value)| (class.as_str(), value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_whole_interval_on_one_side_of_1_decides() {
        let ratio = |low: f64, high: f64| json!({ "median": 1.0, "low": low, "high": high });
        let ratios = [ratio(1.01, 2.0), ratio(0.5, 0.99), ratio(1.0, 2.0), ratio(0.5, 1.0)];
        let names = ["faster", "slower", "from 1", "to 1"];
        let verdict = Verdict::of(names.into_iter().zip(&ratios).chain([("none", &Value::Null)]));
        assert_eq!(verdict.faster, ["faster"]);
        assert_eq!(verdict.slower, ["slower"]);
        assert_eq!(verdict.unclear, ["from 1", "to 1", "none"]);
    }

    #[test]
    fn five_values_are_too_few_and_none_is_another_matter() {
        let counts = [json!(5), json!(6), Value::Null];
        assert_eq!(too_few(["five", "six", "none"].into_iter().zip(&counts)), ["five"]);
    }
}
