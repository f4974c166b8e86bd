//! The spike map as pixels, for TensorBoard's images, which take no SVG.

use super::super::tensorboard::Image;
use super::map::{Cell, Map, Shown};
use super::Sweep;

/// A cell with the margin around it, pixels.
const CELL: [usize; 2] = [12, 20];
/// More points than this share no row: the rest is left out, for a picture has to end.
const ROWS_MAX: usize = 500;

type Colour = [u8; 3];
const PAPER: Colour = [255, 255, 255];
const INK: Colour = [17, 17, 17];
const GREY: Colour = [205, 205, 205];

/// The spike map without its labels: a row a point, a column a step or an equal number of steps.
/// White with a dot is exactly 0, darker is a larger gap, grey stripes did not run, a cross is not
/// finite, a black frame is a spike that the replay predicts.
#[must_use]
pub fn spike_map_png(sweep: &Sweep) -> Image {
    let map = Map::of(sweep);
    let rows = &map.rows[..map.rows.len().min(ROWS_MAX)];
    let mut canvas = Canvas::new(map.columns.len() * CELL[0], rows.len().max(1) * CELL[1]);
    for (y, row) in rows.iter().enumerate() {
        for (x, cell) in row.iter().enumerate() {
            draw(&mut canvas, [x * CELL[0], y * CELL[1]], &map, cell);
        }
    }
    canvas.encode()
}

fn draw(canvas: &mut Canvas, corner: [usize; 2], map: &Map, cell: &Cell) {
    let [w, h] = CELL;
    let inset = if cell.predicted { 4 } else { 1 };
    if cell.predicted {
        canvas.fill(corner, |x, y| (1..w - 1).contains(&x) && (1..h - 1).contains(&y), INK);
        canvas.fill(corner, |x, y| (3..w - 3).contains(&x) && (3..h - 3).contains(&y), PAPER);
    }
    let inside =
        |x: usize, y: usize| (inset..w - inset).contains(&x) && (inset..h - inset).contains(&y);
    let middle = |x: usize, y: usize| x.abs_diff(w / 2) <= 1 && y.abs_diff(h / 2) <= 1;
    match cell.shown {
        Shown::Beyond | Shown::Nothing => {}
        Shown::NotRun => canvas.fill(corner, |x, y| inside(x, y) && (x + y) % 4 == 0, GREY),
        Shown::Gap(0.0) => canvas.fill(corner, middle, GREY),
        Shown::Gap(gap) => canvas.fill(corner, inside, map.colour(gap)),
        Shown::NonFinite => {
            let cross = |x: usize, y: usize| {
                let from_middle = y.abs_diff(h / 2);
                inside(x, y) && from_middle < w / 2 && x.abs_diff(w / 2).abs_diff(from_middle) <= 1
            };
            canvas.fill(corner, cross, INK);
        }
    }
}

struct Canvas {
    width: usize,
    height: usize,
    pixels: Vec<u8>,
}

impl Canvas {
    fn new(width: usize, height: usize) -> Self {
        Self { width, height, pixels: PAPER.repeat(width * height) }
    }

    /// Colours the pixels of one cell that `holds` names by their place in it.
    fn fill(&mut self, [left, top]: [usize; 2], holds: impl Fn(usize, usize) -> bool, to: Colour) {
        for y in 0..CELL[1] {
            for x in (0..CELL[0]).filter(|&x| holds(x, y)) {
                let at = 3 * ((top + y) * self.width + left + x);
                self.pixels[at..at + 3].copy_from_slice(&to);
            }
        }
    }

    fn encode(self) -> Image {
        let side = |pixels: usize| u32::try_from(pixels).expect("rows and columns are bounded");
        let (width, height) = (side(self.width), side(self.height));
        let mut png = Vec::new();
        let mut encoder = png::Encoder::new(&mut png, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        encoder
            .write_header()
            .and_then(|mut writer| writer.write_image_data(&self.pixels))
            .expect("a vector takes every byte, and the size is that of the pixels");
        Image { png, width, height }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{done, point, row, spikes};
    use super::super::{Outcome, Prediction, SweepPoint};
    use super::*;

    fn pixels(image: &Image) -> Vec<u8> {
        let decoder = png::Decoder::new(std::io::Cursor::new(&image.png));
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (image.width, image.height));
        pixels
    }

    #[test]
    fn a_picture_decodes_to_its_cells() {
        let gaps = [row(1, Some(0.0), false, 0), row(2, Some(2.0), true, 0)];
        let predicted = Prediction { spike_steps: spikes(&[2]), ..Prediction::default() };
        let points = [SweepPoint { predicted, ..done("a", 3, &gaps) }];
        let sweep = Sweep { name: "x", axes: &[], points: &points };
        let image = spike_map_png(&sweep);
        assert_eq!((image.width, image.height), (36, 20));
        let pixels = pixels(&image);
        let at =
            |x: usize, y: usize| <[u8; 3]>::try_from(&pixels[3 * (y * 36 + x)..][..3]).unwrap();
        assert_eq!([at(6, 10), at(1, 1)], [GREY, PAPER], "exactly 0");
        let colour = Map::of(&sweep).colour(2.0);
        assert_eq!([at(12 + 6, 10), at(12 + 1, 1), at(12, 0)], [colour, INK, PAPER], "a spike");
        assert!((0..20).any(|y| at(24 + 6, y) == GREY), "not run");
    }

    #[test]
    fn absurd_sweeps_have_a_picture() {
        let pending = point("a", u64::MAX, Outcome::Pending);
        for (points, width, height) in [
            (vec![], 12, 20),
            (vec![pending.clone()], 1440, 20),
            (vec![pending; 2000], 1440, 10_000),
            (vec![done("a", 1, &[row(1, Some(f64::NAN), true, 0)])], 12, 20),
        ] {
            let image = spike_map_png(&Sweep { name: "x", axes: &[], points: &points });
            assert_eq!((image.width, image.height), (width, height));
            pixels(&image);
        }
    }
}
