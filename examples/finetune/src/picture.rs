//! Pictures of a run, as SVG files: mid tones on a transparent ground, legible on white and on black.

use std::fmt::Display;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use burn_moe_lora::experts::ExpertLoad;
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::metrics::StepMetrics;

/// Name of the file with the losses.
pub const LOSS_FILE: &str = "loss.svg";
/// Name of the file with the experts.
pub const EXPERTS_FILE: &str = "experts.svg";

const GREY: RGBColor = RGBColor(128, 128, 128);
const BLUE: RGBColor = RGBColor(52, 136, 214);
const ORANGE: RGBColor = RGBColor(224, 122, 40);
/// From the least to the most.
const SCALE: [RGBColor; 4] = [
    RGBColor(52, 62, 110),
    RGBColor(40, 118, 142),
    RGBColor(64, 176, 124),
    RGBColor(240, 208, 80),
];

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The experts of one layer after a run.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerExperts {
    /// The layer, counted from 0 over all layers of the model.
    pub layer: usize,
    /// Tokens that chose each expert, over all steps of the run.
    pub tokens: Vec<usize>,
    /// The norm of each expert's deltas.
    pub norms: Vec<f64>,
}

impl LayerExperts {
    /// Layers of these numbers, of whose experts nothing is known yet.
    pub fn of(numbers: &[usize]) -> Vec<Self> {
        let layers = numbers.iter().map(|layer| Self {
            layer: *layer,
            tokens: Vec::new(),
            norms: Vec::new(),
        });
        layers.collect()
    }

    /// Adds the tokens of a step.
    pub fn add(&mut self, load: &ExpertLoad) {
        self.tokens.resize(load.tokens.len(), 0);
        for (all, tokens) in self.tokens.iter_mut().zip(&load.tokens) {
            *all += tokens;
        }
    }
}

/// Draws the loss of every step, and points for the losses of the evaluation part.
///
/// # Errors
/// A file that cannot be written.
pub fn draw_loss(folder: &Path, steps: &[StepMetrics], evals: [(usize, f64); 2]) -> Result<()> {
    let steps: Vec<(usize, f64)> = steps.iter().map(|step| (step.step, step.loss)).collect();
    draw(&folder.join(LOSS_FILE), (720, 400), |area| {
        let all = || steps.iter().chain(&evals);
        let losses = all().map(|(_, loss)| *loss);
        let (low, high) = losses.fold((f64::MAX, f64::MIN), |(low, high), loss| {
            (low.min(loss), high.max(loss))
        });
        let margin = (0.08 * (high - low)).max(1e-3);
        let last = all().map(|(step, _)| *step).max().unwrap_or_default();
        let mut chart = ChartBuilder::on(&area)
            .margin(12)
            .margin_right(24)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .build_cartesian_2d(0..last.max(1), low - margin..high + margin)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GREY.mix(0.35))
            .axis_style(GREY)
            .label_style(text(14))
            .y_labels(7)
            .x_desc("step")
            .y_desc("loss, nats a byte")
            .x_label_formatter(&usize::to_string)
            .y_label_formatter(&|loss| format!("{loss:.2}"))
            .draw()?;
        let line = PathElement::new(steps.clone(), BLUE.stroke_width(2));
        chart
            .draw_series([line])?
            .label("training")
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], BLUE.stroke_width(2)));
        chart
            .draw_series(evals.map(|eval| Circle::new(eval, 5, ORANGE.filled())))?
            .label("evaluation part")
            .legend(|(x, y)| Circle::new((x + 9, y), 5, ORANGE.filled()));
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperRight)
            .border_style(TRANSPARENT)
            .label_font(text(14))
            .draw()?;
        Ok(())
    })
}

/// Draws a cell for every layer and expert: the tokens that it got, and the norm of its deltas. An expert
/// that no token chose is an empty cell.
///
/// # Errors
/// A file that cannot be written.
pub fn draw_experts(folder: &Path, layers: &[LayerExperts]) -> Result<()> {
    let experts = layers.iter().map(|layer| layer.tokens.len()).max();
    let cell = Cell::of(experts.unwrap_or_default());
    let map = (
        MARGIN + cell.width * experts.unwrap_or_default() as i32 + GAP,
        TOP + cell.height * layers.len() as i32 + BOTTOM,
    );
    let size = (2 * map.0 + 16, map.1);
    let size = (size.0.max(720) as u32, size.1.max(160) as u32);
    draw(&folder.join(EXPERTS_FILE), size, |area| {
        let (tokens, norms) = area.split_horizontally(size.0 / 2);
        let counts = |layer: &LayerExperts| layer.tokens.iter().map(|n| *n as f64).collect();
        let by_layer = |of: &dyn Fn(&LayerExperts) -> Vec<f64>| -> Vec<(usize, Vec<f64>)> {
            layers
                .iter()
                .map(|layer| (layer.layer, of(layer)))
                .collect()
        };
        let (counts, deltas) = (by_layer(&counts), by_layer(&|layer| layer.norms.clone()));
        heat_map(&tokens, "tokens of each expert", &counts, cell, 0)?;
        heat_map(&norms, "norm of each expert's adapters", &deltas, cell, 3)
    })
}

/// Left of a map's cells, above and below them, and between the maps.
const MARGIN: i32 = 76;
const TOP: i32 = 44;
const BOTTOM: i32 = 88;
const GAP: i32 = 24;

/// Size of a cell in pixels.
#[derive(Clone, Copy)]
struct Cell {
    width: i32,
    height: i32,
}

impl Cell {
    fn of(experts: usize) -> Self {
        match experts {
            0..=16 => Self {
                width: 52,
                height: 30,
            },
            17..=64 => Self {
                width: 14,
                height: 14,
            },
            _ => Self {
                width: 7,
                height: 10,
            },
        }
    }

    fn is_labelled(self) -> bool {
        self.width > 40
    }
}

fn heat_map(
    area: &Area<'_>,
    title: &str,
    layers: &[(usize, Vec<f64>)],
    cell: Cell,
    digits: usize,
) -> Result<(), Failure> {
    let values = || layers.iter().flat_map(|(_, values)| values);
    let most = values().copied().fold(0.0, f64::max);
    let number = |value: f64| format!("{value:.digits$}");
    let label = |label: &str, at, anchor| area.draw(&Text::new(label.to_string(), at, anchor));
    let right = text(14).pos(Pos::new(HPos::Right, VPos::Center));
    let middle = |colour: RGBColor| TextStyle {
        color: colour.to_backend_color(),
        ..text(12).pos(Pos::new(HPos::Center, VPos::Center))
    };
    let below = text(14).pos(Pos::new(HPos::Center, VPos::Top));
    label(title, (MARGIN, 12), text(16))?;
    let experts = layers.iter().map(|(_, values)| values.len()).max();
    let experts = experts.unwrap_or_default();
    for (row, (layer, values)) in layers.iter().enumerate() {
        let top = TOP + row as i32 * cell.height;
        let every = layers.len().div_ceil(24);
        if row % every == 0 {
            let name = format!("layer {layer}");
            label(&name, (MARGIN - 8, top + cell.height / 2), right.clone())?;
        }
        for (expert, value) in values.iter().enumerate() {
            let left = MARGIN + expert as i32 * cell.width;
            let inset = i32::from(cell.is_labelled());
            let corners = [
                (left + inset, top + inset),
                (left + cell.width - inset, top + cell.height - inset),
            ];
            let fill = shade(value / most);
            match *value > 0.0 {
                true => area.draw(&Rectangle::new(corners, fill.filled()))?,
                false => area.draw(&Rectangle::new(corners, GREY.stroke_width(1)))?,
            }
            if cell.is_labelled() {
                let colour = if *value > 0.0 { over(fill) } else { GREY };
                let centre = (left + cell.width / 2, top + cell.height / 2);
                label(&number(*value), centre, middle(colour))?;
            }
        }
    }
    let bottom = TOP + layers.len() as i32 * cell.height;
    let every = experts.div_ceil(16).max(1);
    for expert in (0..experts).step_by(every) {
        let centre = MARGIN + expert as i32 * cell.width + cell.width / 2;
        label(&expert.to_string(), (centre, bottom + 6), below.clone())?;
    }
    label("expert", (MARGIN - 8, bottom + 13), right.clone())?;
    // The scale, from none to the most.
    let (left, width, top) = (MARGIN, 160, bottom + 44);
    for x in 0..width {
        let slice = [(left + x, top), (left + x + 1, top + 10)];
        area.draw(&Rectangle::new(
            slice,
            shade(f64::from(x) / f64::from(width)).filled(),
        ))?;
    }
    label("0", (left - 8, top + 5), right)?;
    let start = text(14).pos(Pos::new(HPos::Left, VPos::Center));
    label(&number(most), (left + width + 8, top + 5), start)?;
    Ok(())
}

/// The colour of a part of the most.
fn shade(part: f64) -> RGBColor {
    let steps = SCALE.len() - 1;
    let place = part.clamp(0.0, 1.0) * steps as f64;
    let below = (place as usize).min(steps - 1);
    let [from, to] = [SCALE[below], SCALE[below + 1]];
    let between = place - below as f64;
    let mix =
        |from: u8, to: u8| (f64::from(from) * (1.0 - between) + f64::from(to) * between) as u8;
    RGBColor(mix(from.0, to.0), mix(from.1, to.1), mix(from.2, to.2))
}

/// The colour of text on this one.
fn over(RGBColor(r, g, b): RGBColor) -> RGBColor {
    let light = 0.299 * f64::from(r) + 0.587 * f64::from(g) + 0.114 * f64::from(b);
    if light > 120.0 { BLACK } else { WHITE }
}

fn text(size: u32) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size)).color(&GREY)
}

/// What plotters ends with; its own type names the backend.
type Failure = Box<dyn std::error::Error>;

fn draw(
    path: &Path,
    size: (u32, u32),
    body: impl FnOnce(Area<'_>) -> Result<(), Failure>,
) -> Result<()> {
    let mut picture = String::new();
    let cannot = |what: &dyn Display| anyhow!("cannot draw '{}': {what}", path.display());
    body(SVGBackend::with_string(&mut picture, size).into_drawing_area())
        .map_err(|error| cannot(&error))?;
    std::fs::write(path, picture).with_context(|| format!("cannot write '{}'", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_and_expert_is_a_cell_and_an_idle_one_is_empty() {
        let folder = tempfile::tempdir().unwrap();
        let mut layers = LayerExperts::of(&[0, 2]);
        for layer in &mut layers {
            for tokens in [[3, 0, 1], [4, 0, 2]] {
                layer.add(&ExpertLoad {
                    tokens: tokens.into(),
                });
            }
            layer.norms = vec![0.25, 0.5, 0.125];
        }
        assert_eq!(layers[1].tokens, [7, 0, 3]);
        draw_experts(folder.path(), &layers).unwrap();
        let picture = std::fs::read_to_string(folder.path().join(EXPERTS_FILE)).unwrap();
        // Text stands on lines of its own.
        for (text, times) in [
            ("7", 3),
            ("0.500", 3),
            ("0.125", 2),
            ("layer 2", 2),
            ("layer 1", 0),
        ] {
            let found = picture.lines().filter(|line| *line == text).count();
            assert_eq!(found, times, "{text}: cells, and the end of the scale");
        }
        let rects = |of: &str| picture.matches(&format!(r#"fill="{of}""#)).count();
        assert_eq!(rects("none"), 2);
        assert!(picture.contains("<svg width=\"720\""));
    }

    #[test]
    fn pictures_have_no_ground_and_end_with_their_steps() {
        let folder = tempfile::tempdir().unwrap();
        let step = |step| StepMetrics {
            step,
            loss: 1.0 / step as f64,
            gradient_norm: 1.0,
            idle_experts: 0,
            imbalance: 1.0,
            tokens: 8,
            seconds: 1.0,
        };
        let steps: Vec<_> = (1..=9).map(step).collect();
        draw_loss(folder.path(), &steps, [(0, 1.25), (9, 0.25)]).unwrap();
        let picture = std::fs::read_to_string(folder.path().join(LOSS_FILE)).unwrap();
        assert!(!picture.contains("<rect"), "a ground");
        // Both points, and the one of the legend.
        assert_eq!(picture.matches("<circle").count(), 3);
        let line = picture
            .lines()
            .find(|line| line.contains("stroke-width=\"2\""));
        let points = line.and_then(|line| line.split("points=\"").nth(1));
        let points = points.and_then(|points| points.split('"').next()).unwrap();
        assert_eq!(points.split_whitespace().count(), 9);
    }

    #[test]
    fn a_folder_that_is_gone_is_named() {
        let folder = tempfile::tempdir().unwrap().path().join("gone");
        let error = draw_experts(&folder, &[]).unwrap_err().to_string();
        assert!(
            error.starts_with("cannot write '") && error.contains(EXPERTS_FILE),
            "{error}"
        );
    }
}
