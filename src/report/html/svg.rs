//! One chart's SVG, element by element, and its x axis of steps.

use std::fmt::Write;

use super::scale::step_ticks;

const WIDTH: f64 = 880.0;
const LEFT: f64 = 58.0;
const RIGHT: f64 = 14.0;
/// Room for the title, and for the labels of the x axis.
pub(super) const TOP: f64 = 26.0;
pub(super) const BOTTOM: f64 = 30.0;

pub(super) struct Svg {
    body: String,
    height: f64,
    first: u64,
    last: u64,
}

macro_rules! draw {
    ($svg:expr, $($format:tt)*) => {
        writeln!($svg.body, $($format)*).expect("a string grows")
    };
}

impl Svg {
    pub(super) fn new(height: f64, title: &str, first: u64, last: u64) -> Self {
        let mut svg = Self { body: String::new(), height, first, last };
        draw!(
            svg,
            "<svg viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-label=\"{title}\">\n\
             <text class=\"title\" x=\"0\" y=\"12\">{title}</text>"
        );
        let bottom = height - BOTTOM;
        for step in step_ticks(first, last) {
            let x = svg.x(step);
            draw!(
                svg,
                "<path d=\"M{x:.1} {bottom}v4\" stroke=\"#111\"/>\
                 <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{step}</text>",
                bottom + 15.0
            );
        }
        draw!(
            svg,
            "<text class=\"quiet\" x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">step</text>",
            LEFT - 8.0,
            bottom + 15.0
        );
        svg
    }

    pub(super) fn x(&self, step: u64) -> f64 {
        let (left, width) = (LEFT + 8.0, WIDTH - LEFT - RIGHT - 16.0);
        if self.first == self.last {
            return left + width / 2.0;
        }
        left + (step - self.first) as f64 / (self.last - self.first) as f64 * width
    }

    /// Small print at the right of the title.
    pub(super) fn note(&mut self, text: &str) {
        let x = WIDTH - RIGHT;
        draw!(
            self,
            "<text class=\"quiet\" x=\"{x}\" y=\"12\" text-anchor=\"end\" \
             xml:space=\"preserve\">{text}</text>"
        );
    }

    pub(super) fn centered(&mut self, y: f64, text: &str) {
        let x = (LEFT + WIDTH - RIGHT) / 2.0;
        draw!(self, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"middle\">{text}</text>");
    }

    pub(super) fn label_left(&mut self, y: f64, label: &str) {
        draw!(
            self,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            LEFT - 8.0,
            y + 4.0
        );
    }

    pub(super) fn grid(&mut self, y: f64, label: &str) {
        let strong = (y - (self.height - BOTTOM)).abs() < 0.01;
        let stroke = if strong { "#111" } else { "#ddd" };
        draw!(self, "<path d=\"M{LEFT} {y:.1}H{}\" stroke=\"{stroke}\"/>", WIDTH - RIGHT);
        self.label_left(y, label);
    }

    pub(super) fn dashed(&mut self, y: f64) {
        draw!(
            self,
            "<path d=\"M{LEFT} {y:.1}H{}\" stroke=\"#111\" stroke-dasharray=\"6 4\"/>",
            WIDTH - RIGHT
        );
    }

    pub(super) fn stem(&mut self, x: f64, from: f64, to: f64) {
        if from != to {
            draw!(self, "<path d=\"M{x:.1} {from:.1}V{to:.1}\" stroke=\"#999\"/>");
        }
    }

    pub(super) fn line(&mut self, path: &str) {
        if !path.is_empty() {
            draw!(self, "<path d=\"{path}\" fill=\"none\" stroke=\"#111\" stroke-width=\"1.5\"/>");
        }
    }

    pub(super) fn mark(&mut self, x: f64, y: f64, spike: bool, label: &str) {
        if spike {
            draw!(
                self,
                "<path d=\"M{x:.1} {:.1}l5 5l-5 5l-5 -5z\" fill=\"#a3140b\">\
                 <title>{label}</title></path>",
                y - 5.0
            );
        } else {
            draw!(
                self,
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"#fff\" stroke=\"#111\">\
                 <title>{label}</title></circle>"
            );
        }
    }

    pub(super) fn dot(&mut self, x: f64, y: f64, label: &str) {
        draw!(
            self,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.5\"><title>{label}</title></circle>"
        );
    }

    pub(super) fn cross(&mut self, x: f64, y: f64, label: &str) {
        draw!(
            self,
            "<path d=\"M{:.1} {:.1}l8 8m0 -8l-8 8\" stroke=\"#a3140b\" stroke-width=\"2\">\
             <title>{label}</title></path>",
            x - 4.0,
            y - 4.0
        );
    }

    pub(super) fn finish(mut self) -> String {
        self.body += "</svg>\n";
        self.body
    }
}
