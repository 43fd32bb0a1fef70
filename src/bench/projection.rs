//! What a box of several cards would do, projected from the steps of one rank: not a measurement, and
//! marked as such wherever it is shown.
//!
//! A step of one rank takes its reading and all else: `measured = bytes / roof + rest`. On a card that
//! reads at another speed, the rest stays as it is (low) or grows with the reading (high); the ranks'
//! exchanges come on top, none of them hidden.

use serde_json::{Value, json};

/// The cards of the box.
#[derive(Debug, Clone)]
pub struct Cards {
    /// Bytes a second of plain reads of one card.
    pub bandwidth: f64,
    /// Where that is from.
    pub bandwidth_from: &'static str,
    /// Microseconds of one exchange of all ranks, by rising numbers of rows; at least one.
    pub exchanges: Vec<(f64, f64)>,
    /// Where they are from.
    pub exchanges_from: &'static str,
}

impl Default for Cards {
    /// RTX PRO 6000 Blackwell, as read in practice (facts/performance.md §2.6).
    fn default() -> Self {
        Self {
            bandwidth: 1.64e12,
            bandwidth_from: "published",
            exchanges: PUBLISHED.to_vec(),
            exchanges_from: "published",
        }
    }
}

impl Cards {
    /// Microseconds of an exchange of any number of rows, on straight lines through those that are known.
    fn exchange_us(&self, rows: f64) -> f64 {
        let beyond = self.exchanges.windows(2).find(|pair| rows <= pair[1].0);
        match (beyond.or(self.exchanges.windows(2).last()), self.exchanges.first()) {
            (Some(&[(r0, t0), (r1, t1)]), _) => t0 + (rows - r0) / (r1 - r0) * (t1 - t0),
            (_, first) => first.map_or(0.0, |(_, us)| *us),
        }
    }
}

/// Microseconds of an all-reduce of so many BF16 rows of GLM-5 over PCIe, 8 ranks (FlashInfer's
/// exchange over peer memory, facts/performance.md §2.5).
const PUBLISHED: [(f64, f64); 5] = [(1.0, 8.3), (2.0, 9.7), (4.0, 14.4), (8.0, 25.6), (16.0, 48.0)];

/// A rank's work, as the device reports it.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// Bytes that a step of one row reads, and what each expert more adds in all layers.
    pub step_bytes: f64,
    pub expert_bytes: f64,
    /// Routed experts of a layer, and those of a row.
    pub experts: f64,
    pub experts_used: f64,
    /// Bytes a second of plain reads where it was measured.
    pub roof: f64,
    /// Exchanges of a step: two a layer, and one for the head.
    pub exchanges: f64,
}

impl Work {
    /// Bytes that a step of `rows` rows reads, if their experts are independent of each other.
    fn bytes(&self, rows: f64) -> f64 {
        let distinct = self.experts * (1.0 - (1.0 - self.experts_used / self.experts).powf(rows));
        self.step_bytes + (distinct - self.experts_used).max(0.0) * self.expert_bytes
    }

    /// Milliseconds of a step on the cards, from what it took here: low and high.
    fn project(&self, rows: f64, measured_ms: f64, cards: &Cards) -> (f64, f64) {
        let bytes = self.bytes(rows);
        let reading = |bandwidth: f64| bytes / bandwidth * 1e3;
        let rest = (measured_ms - reading(self.roof)).max(0.0);
        let exchanges = self.exchanges * cards.exchange_us(rows) / 1e3;
        let low = rest + reading(cards.bandwidth) + exchanges;
        (low, measured_ms * self.roof / cards.bandwidth + exchanges)
    }
}

/// The projection of a report's steps; `summary` and `steps` are its `summary` and `step_ms_by_rows`.
pub fn projection(
    work: &Work,
    cards: &Cards,
    ranks: usize,
    summary: &Value,
    steps: &[Value],
) -> Value {
    let step = |step: &Value| {
        let (rows, measured) = (step["rows"].as_f64()?, step["p50"].as_f64()?);
        let (low, high) = work.project(rows, measured, cards);
        Some(json!({
            "rows": rows as u64, "measured_ms": measured, "bytes": work.bytes(rows),
            "reduce_us": cards.exchange_us(rows), "low_ms": low, "high_ms": high,
        }))
    };
    let steps: Vec<Value> = steps.iter().filter_map(step).collect();
    let of_rows = |rows: f64| steps.iter().find(|step| step["rows"].as_f64() == Some(rows));
    let per_second = |tokens: f64, step: &Value, more_ms: f64| {
        let rate = |ms: &Value| ms.as_f64().map(|ms| tokens * 1e3 / (ms + more_ms));
        json!({ "low": rate(&step["high_ms"]), "high": rate(&step["low_ms"]) })
    };
    let speculative = &summary["speculative"];
    let rows = speculative["draft_tokens_per_round"].as_f64().map(|guesses| guesses.round() + 1.0);
    let speculated = rows.and_then(of_rows).zip(speculative["acceptance_length"].as_f64()).map(
        |(step, length)| per_second(length, step, speculative["draft_ms"].as_f64().unwrap_or(0.0)),
    );
    json!({
        "is": "a projection, not a measurement",
        "cards": ranks,
        "card_bandwidth": cards.bandwidth,
        "card_bandwidth_from": cards.bandwidth_from,
        "measured_roof": work.roof,
        "reduce_us_from": cards.exchanges_from,
        "exchanges": work.exchanges as u64,
        "formula": {
            "low_ms": "measured - bytes / measured_roof + bytes / card_bandwidth + exchanges x reduce_us",
            "high_ms": "measured x measured_roof / card_bandwidth + exchanges x reduce_us",
        },
        "steps": steps,
        "plain_tokens_per_second": of_rows(1.0).map(|step| per_second(1.0, step, 0.0)),
        "speculative_tokens_per_second": speculated,
    })
}

/// The projection for people.
pub fn projection_lines(projection: &Value) -> String {
    if projection.is_null() {
        return String::new();
    }
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let mut text = format!(
        "\nPROJECTED, not measured: {} cards that read at {:.2} TB/s ({}; here {:.2}), {} exchanges a step \
         (times {})\n\
         rows  measured ms      GB   exchange us   projected ms\n",
        projection["cards"],
        number(&projection["card_bandwidth"]) / 1e12,
        projection["card_bandwidth_from"].as_str().unwrap_or("?"),
        number(&projection["measured_roof"]) / 1e12,
        projection["exchanges"],
        projection["reduce_us_from"].as_str().unwrap_or("?"),
    );
    for step in projection["steps"].as_array().into_iter().flatten() {
        text += &format!(
            "{:>4}  {:>11.2}  {:>6.2}  {:>12.1}   {:.1} to {:.1}\n",
            number(&step["rows"]),
            number(&step["measured_ms"]),
            number(&step["bytes"]) / 1e9,
            number(&step["reduce_us"]),
            number(&step["low_ms"]),
            number(&step["high_ms"])
        );
    }
    for (name, rate) in [
        ("plain", &projection["plain_tokens_per_second"]),
        ("speculative", &projection["speculative_tokens_per_second"]),
    ] {
        if !rate.is_null() {
            let (low, high) = (number(&rate["low"]), number(&rate["high"]));
            text += &format!("{name}: {low:.0} to {high:.0} tok/s\n");
        }
    }
    let formula = &projection["formula"];
    let said = |key: &str| formula[key].as_str().unwrap_or("?").to_owned();
    text + &format!("low = {}\nhigh = {}\n", said("low_ms"), said("high_ms"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORK: Work = Work {
        step_bytes: 8.0e9,
        expert_bytes: 0.1e9,
        experts: 256.0,
        experts_used: 8.0,
        roof: 4.0e12,
        exchanges: 157.0,
    };

    #[test]
    fn published_times_are_met_and_joined_by_lines() {
        let cards = Cards::default();
        for (rows, us) in PUBLISHED {
            assert!((cards.exchange_us(rows) - us).abs() < 1e-9);
        }
        assert!((cards.exchange_us(3.0) - 12.05).abs() < 1e-9);
        assert!(cards.exchange_us(20.0) > 48.0);
        let one = Cards { exchanges: vec![(1.0, 7.0)], ..Cards::default() };
        assert_eq!(one.exchange_us(4.0), 7.0);
    }

    #[test]
    fn a_step_keeps_its_rest_or_grows_with_the_reading() {
        let cards = Cards { bandwidth: 2.0e12, exchanges: vec![(1.0, 10.0)], ..Cards::default() };
        // 2 ms of reading here, 4 there; 3 ms of rest; 1.57 ms of exchanges.
        let (low, high) = WORK.project(1.0, 5.0, &cards);
        assert!((low - 8.57).abs() < 1e-9 && (high - 11.57).abs() < 1e-9, "{low} {high}");
        // Two rows use 15.75 experts of 256, if by chance.
        assert!((WORK.bytes(2.0) - 8.775e9).abs() < 1e3, "{}", WORK.bytes(2.0));
    }

    #[test]
    fn the_report_says_what_it_is_and_from_what() {
        let summary = json!({"speculative": {
            "draft_tokens_per_round": 3.0, "acceptance_length": 2.5, "draft_ms": 1.0,
        }});
        let steps = [json!({"rows": 1, "p50": 5.0}), json!({"rows": 4, "p50": 7.0})];
        let found = projection(&WORK, &Cards::default(), 8, &summary, &steps);
        let text = projection_lines(&found);
        for words in ["PROJECTED, not measured: 8 cards", "157 exchanges", "published", "high = "] {
            assert!(text.contains(words), "{words} in {text}");
        }
        let step = &found["steps"][1];
        let low = step["low_ms"].as_f64().expect("a number");
        let high = found["speculative_tokens_per_second"]["high"].as_f64().expect("a number");
        assert!((high - 2500.0 / (low + 1.0)).abs() < 1e-9);
        assert_eq!(projection_lines(&Value::Null), "");
    }
}
