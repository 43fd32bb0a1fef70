//! Which variant each number of rows takes.

use super::Variant;

/// A variant for each number of rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// (rows up to which, variant), in rising order; never empty. The last serves all rows beyond.
    steps: Vec<(usize, Variant)>,
}

impl Choice {
    /// One variant for all.
    pub fn only(variant: Variant) -> Self {
        Self { steps: vec![(usize::MAX, variant)] }
    }

    /// The variants of these numbers of rows, which rise; numbers between take the next one's.
    pub fn of(steps: Vec<(usize, Variant)>) -> Option<Self> {
        let rising = steps.windows(2).all(|pair| pair[0].0 < pair[1].0);
        (rising && !steps.is_empty()).then_some(Self { steps })
    }

    /// The variant for `rows` rows.
    pub fn variant(&self, rows: usize) -> Variant {
        let step = self.steps.iter().find(|(up_to, _)| rows <= *up_to);
        step.unwrap_or(&self.steps[self.steps.len() - 1]).1
    }

    /// Whether GPUs touch each other's memory in it.
    pub fn needs_peer_access(&self) -> bool {
        self.steps.iter().any(|(_, variant)| variant.needs_peer_access())
    }

    /// As (rows, variant).
    pub fn steps(&self) -> &[(usize, Variant)] {
        &self.steps
    }

    /// "push up to 2 rows, then owner".
    pub fn summary(&self) -> String {
        let mut runs: Vec<(usize, Variant)> = Vec::new();
        for (rows, variant) in &self.steps {
            match runs.last_mut() {
                Some(last) if last.1 == *variant => last.0 = *rows,
                _ => runs.push((*rows, *variant)),
            }
        }
        let last = runs.len() - 1;
        let said = runs.iter().enumerate().map(|(i, (rows, variant))| match (i, last) {
            (0, 0) => format!("{variant}"),
            (i, last) if i == last => format!("then {variant}"),
            (_, _) => format!("{variant} up to {rows} rows"),
        });
        said.collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_between_take_the_next_variant_and_rows_beyond_the_last() {
        let choice = Choice::of(vec![(1, Variant::Push), (4, Variant::Push), (16, Variant::Owner)])
            .expect("rising");
        assert_eq!(choice.variant(1), Variant::Push);
        assert_eq!(choice.variant(3), Variant::Push);
        assert_eq!(choice.variant(5), Variant::Owner);
        assert_eq!(choice.variant(100), Variant::Owner);
        assert_eq!(choice.summary(), "push up to 4 rows, then owner");
        assert!(choice.needs_peer_access());
        assert_eq!(Choice::only(Variant::Staged).summary(), "staged");
        assert!(!Choice::only(Variant::Staged).needs_peer_access());
        assert_eq!(Choice::of(vec![(4, Variant::Push), (1, Variant::Pull)]), None);
        assert_eq!(Choice::of(Vec::new()), None);
    }
}
