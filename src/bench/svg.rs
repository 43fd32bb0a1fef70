//! The plots of the page, as SVG text. Colours come from the page's style sheet, so that one plot
//! serves a light screen, a dark one and paper; the sizes are such that a phone can show it.

use super::html::escape;
use super::statistics::Interval;

/// Width of every plot in its own units; a phone shows it at about three quarters.
const WIDTH: f64 = 460.0;
/// Room right of the last place of an axis, for the value that stands beside it.
const MARGIN: f64 = 46.0;
/// Names longer than this are cut: a class is named by the user.
const NAME_CHARS: usize = 14;

/// Bars of one class, one below the other.
pub(super) struct Group<'a> {
    /// The class.
    pub name: &'a str,
    /// Style and value of each bar.
    pub bars: Vec<(&'static str, Interval)>,
}

/// Horizontal bars with whiskers, which leave room for long names and for many of them.
pub(super) fn bars(title: &str, unit: &str, groups: &[Group]) -> String {
    let (thick, gap, top) = (15.0, 14.0, 8.0);
    let values = || groups.iter().flat_map(|group| &group.bars).map(|(_, value)| value.high);
    let ticks = Ticks::up_to(values().fold(0.0, f64::max));
    let longest = groups.iter().map(|group| group.name.chars().count()).max().unwrap_or(0);
    let left = 12.0 + 7.0 * longest.min(NAME_CHARS) as f64;
    let x = |value: f64| left + value / ticks.last() * (WIDTH - MARGIN - left);
    let mut body = String::new();
    let mut y = top;
    for group in groups {
        let whole = thick * group.bars.len() as f64;
        body += &text("name", left - 8.0, y + whole / 2.0 + 4.0, &name(group.name));
        for (style, value) in &group.bars {
            let (median, low, high) = (x(value.median), x(value.low), x(value.high));
            let middle = y + thick / 2.0;
            body += &format!(
                "<rect class=\"fill {style}\" x=\"{left:.1}\" y=\"{:.1}\" width=\"{:.1}\" \
                 height=\"{:.1}\"/><path class=\"whisker\" d=\"M{low:.1} {middle:.1}H{high:.1}M\
                 {low:.1} {:.1}v6M{high:.1} {:.1}v6\"/>",
                y + 1.0,
                median - left,
                thick - 2.0,
                middle - 3.0,
                middle - 3.0,
            );
            let label = format!("{:.1}", value.median);
            body += &text("value start", high.max(median) + 6.0, middle + 4.0, &label);
            y += thick;
        }
        y += gap;
    }
    let mut grid = String::new();
    for tick in ticks.values() {
        let place = x(tick);
        grid += &format!("<path class=\"grid\" d=\"M{place:.1} {top}V{:.1}\"/>", y - 6.0);
        grid += &text("tick", place, y + 8.0, &ticks.label(tick));
    }
    grid += &text("tick", (left + WIDTH - MARGIN) / 2.0, y + 26.0, unit);
    frame(title, y + 34.0, &(grid + &body))
}

/// A plot over numbered slots, for example the rows of a step.
pub(super) struct Slots {
    title: String,
    ticks: Ticks,
    count: usize,
    height: f64,
    body: String,
}

impl Slots {
    const LEFT: f64 = 44.0;
    const TOP: f64 = 34.0;
    const BOTTOM: f64 = 224.0;

    /// An empty plot for values up to `highest`. Each slot has a label and a note below it; `titles`
    /// are those of the axis across and of the axis up.
    pub fn new(
        title: &str,
        titles: (&str, &str),
        labels: &[(String, String)],
        highest: f64,
    ) -> Self {
        let (ticks, count) = (Ticks::up_to(highest), labels.len());
        let mut plot =
            Self { title: title.to_owned(), ticks, count, height: 0.0, body: String::new() };
        for tick in plot.ticks.values() {
            let y = plot.y(tick);
            plot.body += &format!(
                "<path class=\"grid\" d=\"M{} {y:.1}H{:.1}\"/>",
                Self::LEFT,
                WIDTH - MARGIN / 2.0
            );
            plot.body += &text("tick end", Self::LEFT - 6.0, y + 4.0, &plot.ticks.label(tick));
        }
        let mut below = Self::BOTTOM + 16.0;
        for (slot, (label, note)) in labels.iter().enumerate() {
            plot.body += &text("tick", plot.x(slot), below, label);
            plot.body += &text("note", plot.x(slot), below + 14.0, note);
        }
        below += if labels.iter().all(|(_, note)| note.is_empty()) { 18.0 } else { 32.0 };
        plot.body += &text("tick", (Self::LEFT + WIDTH - MARGIN / 2.0) / 2.0, below, titles.0);
        plot.body += &text("tick start", 4.0, 14.0, titles.1);
        plot.height = below + 8.0;
        plot
    }

    /// Adds a column with its value above it.
    pub fn column(&mut self, slot: usize, style: &str, value: f64) {
        let (x, y) = (self.x(slot), self.y(value));
        let width = (self.step() * 0.64).min(44.0);
        self.body += &format!(
            "<rect class=\"fill {style}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" \
             height=\"{:.1}\"/>",
            x - width / 2.0,
            Self::BOTTOM - y,
        );
        self.body += &text("value", x, y - 5.0, &three_digits(value));
    }

    /// Adds a point with whiskers and its value beside it.
    pub fn point(&mut self, slot: usize, style: &str, value: &Interval) {
        let (x, y) = (self.x(slot), self.y(value.median));
        let (low, high) = (self.y(value.low), self.y(value.high));
        self.body += &format!(
            "<path class=\"whisker\" d=\"M{x:.1} {low:.1}V{high:.1}M{:.1} {low:.1}h8M{:.1} \
             {high:.1}h8\"/><circle class=\"fill {style}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"5\"/>",
            x - 4.0,
            x - 4.0,
        );
        self.body += &text("value start", x + 9.0, y + 4.0, &format!("{:.2}", value.median));
    }

    /// Adds a line through the slots from the first on, with a dot at each value.
    pub fn line(&mut self, style: &str, values: &[f64]) {
        let place = |(slot, value): (usize, &f64)| (self.x(slot), self.y(*value));
        let places: Vec<(f64, f64)> = values.iter().enumerate().map(place).collect();
        let points: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        self.body += &format!("<polyline class=\"line {style}\" points=\"{}\"/>", points.join(" "));
        for (x, y) in places {
            self.body +=
                &format!("<circle class=\"fill {style}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\"/>");
        }
    }

    /// Adds a dashed line at `value` over all slots.
    pub fn level(&mut self, value: f64) {
        let (y, right) = (self.y(value), WIDTH - MARGIN / 2.0);
        self.body += &format!("<path class=\"level\" d=\"M{} {y:.1}H{right:.1}\"/>", Self::LEFT);
    }

    /// The plot as SVG.
    pub fn finish(self) -> String {
        frame(&self.title, self.height, &self.body)
    }

    fn step(&self) -> f64 {
        (WIDTH - MARGIN / 2.0 - Self::LEFT) / self.count.max(1) as f64
    }

    fn x(&self, slot: usize) -> f64 {
        Self::LEFT + self.step() * (slot as f64 + 0.5)
    }

    fn y(&self, value: f64) -> f64 {
        Self::BOTTOM - value / self.ticks.last() * (Self::BOTTOM - Self::TOP)
    }
}

/// Round numbers along an axis that starts at 0.
struct Ticks {
    step: f64,
    count: usize,
}

impl Ticks {
    /// At most seven of them, the last at `highest` or above.
    fn up_to(highest: f64) -> Self {
        let highest = if highest.is_finite() && highest > 0.0 { highest } else { 1.0 };
        let magnitude = 10f64.powf((highest / 6.0).log10().floor());
        // A tiny bit less, so that 1.0 over a step of 0.2 does not need one more.
        let steps = |step: f64| (highest / step - 1e-9).ceil();
        let step = [1.0, 2.0, 5.0].map(|factor| factor * magnitude);
        let step = step.into_iter().find(|step| steps(*step) <= 6.0).unwrap_or(10.0 * magnitude);
        Self { step, count: steps(step) as usize }
    }

    fn last(&self) -> f64 {
        self.step * self.count as f64
    }

    fn values(&self) -> impl Iterator<Item = f64> + use<> {
        let step = self.step;
        (0..=self.count).map(move |tick| step * tick as f64)
    }

    fn label(&self, tick: f64) -> String {
        let digits = (-self.step.log10().floor()).max(0.0) as usize;
        format!("{tick:.digits$}")
    }
}

fn frame(title: &str, height: f64, body: &str) -> String {
    format!(
        "<svg viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{}\">{body}</svg>\n",
        escape(title)
    )
}

fn text(style: &str, x: f64, y: f64, words: &str) -> String {
    match words.is_empty() {
        true => String::new(),
        false => {
            format!("<text class=\"{style}\" x=\"{x:.1}\" y=\"{y:.1}\">{}</text>", escape(words))
        }
    }
}

fn name(name: &str) -> String {
    match name.chars().count() > NAME_CHARS {
        true => name.chars().take(NAME_CHARS - 1).chain(['…']).collect(),
        false => name.to_owned(),
    }
}

/// Three digits that count: a step takes 0.123 ms or 1230 ms.
fn three_digits(value: f64) -> String {
    let digits = match value {
        value if value >= 100.0 => 0,
        value if value >= 10.0 => 1,
        value if value >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_highest_value() {
        for (highest, step, count) in [
            (1.0, 0.2, 5),
            (0.0, 0.2, 5),
            (f64::NAN, 0.2, 5),
            (36.4, 10.0, 4),
            (196.0, 50.0, 4),
            (0.011, 0.002, 6),
            (12_345.0, 5000.0, 3),
        ] {
            let ticks = Ticks::up_to(highest);
            assert!((ticks.step / step - 1.0).abs() < 1e-9, "{highest}: step {}", ticks.step);
            assert_eq!(ticks.count, count, "{highest}");
        }
        assert_eq!(Ticks::up_to(1.0).label(0.4), "0.4");
        assert_eq!(Ticks::up_to(36.4).label(10.0), "10");
    }

    #[test]
    fn every_mark_stays_inside_its_plot() {
        let interval = Interval { median: 10.0, low: 5.0, high: 100.0 };
        let bars = bars("t", "tok/s", &[Group { name: "a", bars: vec![("plain", interval)] }]);
        let mut slots = Slots::new("t", ("x", "y"), &[("1".into(), "n=1".into())], 100.0);
        slots.column(0, "plain", 100.0);
        slots.point(0, "plain", &interval);
        slots.level(1.0);
        for svg in [bars, slots.finish()] {
            let numbers = |before: &str| -> Vec<f64> {
                let rest = svg.split(before).skip(1);
                rest.map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect()
            };
            let height = numbers("viewBox=\"0 0 460 ")[0];
            let limits =
                [(" x=\"", WIDTH), (" cx=\"", WIDTH), (" y=\"", height), (" cy=\"", height)];
            for (attribute, limit) in limits {
                for number in numbers(attribute) {
                    assert!((0.0..=limit).contains(&number), "{attribute}{number} in {svg}");
                }
            }
        }
    }

    #[test]
    fn long_names_are_cut_and_small_numbers_keep_their_digits() {
        assert_eq!(name("code"), "code");
        assert_eq!(name("aaaaaaaaaaaaaaaaaaaa"), "aaaaaaaaaaaaa…");
        assert_eq!(
            [0.1234, 5.378, 20.75, 1234.5].map(three_digits),
            ["0.123", "5.38", "20.8", "1234"]
        );
    }
}
