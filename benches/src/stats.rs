//! Medians and quartiles, and the text of numbers.

/// The lower quartile, the median and the upper quartile of a list of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quartiles {
    pub(crate) low: f64,
    pub(crate) median: f64,
    pub(crate) high: f64,
}

impl Quartiles {
    /// By linear interpolation between the two nearest ranks. `values` must not be empty.
    pub(crate) fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let at = |quantile: f64| {
            let rank = quantile * (sorted.len() - 1) as f64;
            let (below, above) = (rank.floor() as usize, rank.ceil() as usize);
            sorted[below] + (sorted[above] - sorted[below]) * rank.fract()
        };
        Self {
            low: at(0.25),
            median: at(0.5),
            high: at(0.75),
        }
    }
}

/// Nanoseconds with three digits and a unit.
pub(crate) fn time(nanos: f64) -> String {
    let (value, unit) = match nanos {
        n if n < 1e3 => (n, "ns"),
        n if n < 1e6 => (n / 1e3, "us"),
        n => (n / 1e6, "ms"),
    };
    let digits = if value < 10.0 {
        2
    } else {
        usize::from(value < 100.0)
    };
    format!("{value:.digits$} {unit}")
}

/// Bytes in the largest unit that divides them.
pub(crate) fn size(bytes: usize) -> String {
    match bytes {
        0 => String::from("-"),
        n if n.is_multiple_of(1 << 20) => format!("{} MiB", n >> 20),
        n if n.is_multiple_of(1 << 10) => format!("{} KiB", n >> 10),
        n => format!("{n} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_interpolated() {
        let all = |low, median, high| Quartiles { low, median, high };
        assert_eq!(Quartiles::of(&[7.0]), all(7.0, 7.0, 7.0));
        assert_eq!(Quartiles::of(&[4.0, 1.0, 3.0, 2.0]), all(1.75, 2.5, 3.25));
        let values: Vec<f64> = (1..=9).rev().map(f64::from).collect();
        assert_eq!(Quartiles::of(&values), all(3.0, 5.0, 7.0));
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(time(7.654), "7.65 ns");
        assert_eq!(time(76.54), "76.5 ns");
        assert_eq!(time(765.4), "765 ns");
        assert_eq!(time(7_654.0), "7.65 us");
        assert_eq!(time(7_654_321.0), "7.65 ms");
        assert_eq!(
            [0, 8, 4096, 1 << 20].map(size),
            ["-", "8 B", "4 KiB", "1 MiB"]
        );
    }
}
