//! One chart's SVG, element by element, and the frame of those whose x axis counts something.

use std::fmt::Write;

use super::scale::step_ticks;
use super::text::{escape, plain};

/// What a spike is drawn with; in black and white its shape says the same.
pub(in crate::report) const RED: &str = "#a3140b";

/// A picture that grows. Every text is made visible and escaped here.
pub(in crate::report) struct Svg {
    body: String,
    width: f64,
    height: f64,
    title: String,
}

/// Which end of a text stands at its x.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::report) enum Anchor {
    Start,
    Middle,
    End,
}

macro_rules! draw {
    ($svg:expr, $($format:tt)*) => {
        writeln!($svg.body, $($format)*).expect("a string grows")
    };
}

impl Svg {
    pub(in crate::report) fn new(width: f64, height: f64, title: &str) -> Self {
        let mut svg = Self { body: String::new(), width, height, title: title.to_owned() };
        svg.text(0.0, 12.0, Anchor::Start, "title", title);
        svg
    }

    /// One line; `class` is one of svg.css, or empty.
    pub(in crate::report) fn text(
        &mut self,
        x: f64,
        y: f64,
        anchor: Anchor,
        class: &str,
        text: &str,
    ) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let space = if text.contains("  ") { " xml:space=\"preserve\"" } else { "" };
        let text = escape(&plain(text));
        draw!(self, "<text{class} x=\"{x:.1}\" y=\"{y:.1}\"{anchor}{space}>{text}</text>");
    }

    /// A line of text that reads downwards from (x, y).
    pub(in crate::report) fn text_down(&mut self, x: f64, y: f64, class: &str, text: &str) {
        let text = escape(&plain(text));
        draw!(
            self,
            "<text class=\"{class}\" transform=\"translate({x:.1} {y:.1}) rotate(90)\">\
             {text}</text>"
        );
    }

    /// `style` is attributes; the label shows under the pointer.
    pub(in crate::report) fn path(&mut self, d: &str, style: &str, label: &str) {
        draw!(self, "<path d=\"{d}\" {style}>{}</path>", tooltip(label));
    }

    pub(in crate::report) fn rect(&mut self, [x, y, w, h]: [f64; 4], style: &str, label: &str) {
        draw!(
            self,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" {style}>{}</rect>",
            tooltip(label)
        );
    }

    pub(in crate::report) fn circle(&mut self, x: f64, y: f64, r: f64, style: &str, label: &str) {
        draw!(
            self,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r:.1}\" {style}>{}</circle>",
            tooltip(label)
        );
    }

    pub(in crate::report) fn diamond(&mut self, x: f64, y: f64, r: f64, style: &str, label: &str) {
        let d = format!("M{x:.1} {:.1}l{r:.1} {r:.1}l-{r:.1} {r:.1}l-{r:.1} -{r:.1}z", y - r);
        self.path(&d, style, label);
    }

    pub(in crate::report) fn cross(&mut self, x: f64, y: f64, r: f64, label: &str) {
        let (left, top, side) = (x - r, y - r, 2.0 * r);
        let d =
            format!("M{left:.1} {top:.1}l{side:.1} {side:.1}m0 -{side:.1}l-{side:.1} {side:.1}");
        self.path(&d, &format!("fill=\"none\" stroke=\"{RED}\" stroke-width=\"2\""), label);
    }

    /// Slanted lines over a rectangle, for what was not measured.
    pub(in crate::report) fn hatch(&mut self, [x, y, w, h]: [f64; 4], label: &str) {
        const GAP: f64 = 6.0;
        let mut d = String::new();
        // Each line starts on the left or the lower edge and ends on the upper or the right one.
        let lines = ((w + h) / GAP) as usize;
        for along in (1..=lines).map(|i| i as f64 * GAP - GAP / 2.0) {
            let (x0, y0) = if along < h { (0.0, along) } else { (along - h, h) };
            let (x1, y1) = if along < w { (along, 0.0) } else { (w, along - w) };
            write!(d, "M{:.1} {:.1}L{:.1} {:.1}", x + x0, y + y0, x + x1, y + y1)
                .expect("a string grows");
        }
        self.rect([x, y, w, h], "fill=\"#f4f4f4\"", label);
        self.path(&d, "stroke=\"#aaa\" stroke-width=\"0.8\" pointer-events=\"none\"", "");
    }

    /// As an element of a page that has svg.css.
    pub(in crate::report) fn into_element(self) -> String {
        format!("<svg {}>\n{}</svg>\n", self.attributes(0.0), self.body)
    }

    /// As a file of its own, with some white around it.
    pub(in crate::report) fn into_file(self) -> String {
        const MARGIN: f64 = 12.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" {}>\n<style>\n\
             {}</style>\n<rect x=\"-{MARGIN}\" y=\"-{MARGIN}\" width=\"100%\" height=\"100%\" \
             fill=\"#fff\"/>\n{}</svg>\n",
            self.width + 2.0 * MARGIN,
            self.height + 2.0 * MARGIN,
            self.attributes(MARGIN),
            include_str!("svg.css"),
            self.body
        )
    }

    fn attributes(&self, margin: f64) -> String {
        let [width, height] = [self.width, self.height].map(|side| side + 2.0 * margin);
        let title = escape(&plain(&self.title));
        format!(
            "viewBox=\"{0} {0} {width} {height}\" role=\"img\" aria-label=\"{title}\"",
            0.0 - margin
        )
    }
}

fn tooltip(label: &str) -> String {
    if label.is_empty() {
        String::new()
    } else {
        format!("<title>{}</title>", escape(&plain(label)))
    }
}

/// A chart of a page's wide column, and one of two side by side.
pub(super) const WIDE: f64 = 880.0;
pub(super) const HALF: f64 = 680.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
/// Room for the title, and for the labels of the x axis.
pub(super) const TOP: f64 = 26.0;
pub(super) const BOTTOM: f64 = 30.0;

/// A chart over whole numbers from `first` to `last`.
pub(super) struct Plot {
    pub svg: Svg,
    bottom: f64,
    first: u64,
    last: u64,
}

impl Plot {
    /// An empty frame; `axis` names what the x axis counts.
    pub(super) fn new(size: [f64; 2], title: &str, axis: &str, [first, last]: [u64; 2]) -> Self {
        let mut plot = Self::bare(size, size[1] - BOTTOM, title, [first, last]);
        for tick in step_ticks(first, last) {
            let x = plot.x(tick);
            plot.tick(x);
            plot.svg.text(x, plot.bottom + 15.0, Anchor::Middle, "", &tick.to_string());
        }
        plot.svg.text(0.0, plot.bottom + 15.0, Anchor::Start, "quiet", axis);
        plot
    }

    /// Without any label under the x axis, which is at `bottom`.
    pub(super) fn bare(
        [width, height]: [f64; 2],
        bottom: f64,
        title: &str,
        [first, last]: [u64; 2],
    ) -> Self {
        Self { svg: Svg::new(width, height, title), bottom, first, last }
    }

    fn right(&self) -> f64 {
        self.svg.width - RIGHT
    }

    pub(super) fn x(&self, at: u64) -> f64 {
        let (left, width) = (LEFT + 8.0, self.right() - LEFT - 16.0);
        if self.first == self.last {
            return left + width / 2.0;
        }
        left + (at - self.first) as f64 / (self.last - self.first) as f64 * width
    }

    pub(super) fn tick(&mut self, x: f64) {
        self.svg.path(&format!("M{x:.1} {}v4", self.bottom), "stroke=\"#111\"", "");
    }

    /// Small print at the right of the title.
    pub(super) fn note(&mut self, text: &str) {
        self.svg.text(self.right(), 12.0, Anchor::End, "quiet", text);
    }

    pub(super) fn centered(&mut self, y: f64, text: &str) {
        self.svg.text((LEFT + self.right()) / 2.0, y, Anchor::Middle, "", text);
    }

    pub(super) fn label_left(&mut self, y: f64, label: &str) {
        self.svg.text(LEFT - 8.0, y + 4.0, Anchor::End, "", label);
    }

    pub(super) fn grid(&mut self, y: f64, label: &str) {
        let strong = (y - self.bottom).abs() < 0.01;
        let stroke = if strong { "#111" } else { "#ddd" };
        self.across(y, &format!("stroke=\"{stroke}\""));
        self.label_left(y, label);
    }

    pub(super) fn dashed(&mut self, y: f64) {
        self.across(y, "stroke=\"#111\" stroke-dasharray=\"6 4\"");
    }

    fn across(&mut self, y: f64, style: &str) {
        self.svg.path(&format!("M{LEFT} {y:.1}H{}", self.right()), style, "");
    }

    pub(super) fn stem(&mut self, x: f64, from: f64, to: f64) {
        if from != to {
            self.svg.path(&format!("M{x:.1} {from:.1}V{to:.1}"), "stroke=\"#999\"", "");
        }
    }

    pub(super) fn line(&mut self, path: &str) {
        if !path.is_empty() {
            self.svg.path(path, "fill=\"none\" stroke=\"#111\" stroke-width=\"1.5\"", "");
        }
    }

    pub(super) fn mark(&mut self, x: f64, y: f64, spike: bool, label: &str) {
        if spike {
            self.svg.diamond(x, y, 5.0, &format!("fill=\"{RED}\""), label);
        } else {
            self.svg.circle(x, y, 3.0, "fill=\"#fff\" stroke=\"#111\"", label);
        }
    }

    pub(super) fn dot(&mut self, x: f64, y: f64, label: &str) {
        self.svg.circle(x, y, 2.5, "", label);
    }

    pub(super) fn cross(&mut self, x: f64, y: f64, label: &str) {
        self.svg.cross(x, y, 4.0, label);
    }

    pub(super) fn finish(self) -> String {
        self.svg.into_element()
    }
}
