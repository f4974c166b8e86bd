//! TensorBoard's messages, one function a kind. Each value carries its tag's metadata; the writer
//! keeps it on the tag's first event.

use protobuf::Message;
use serde_json::Value;
use tensorboard_proto::api::{DataType as HparamType, HParamInfo, MetricInfo, Status};
use tensorboard_proto::plugin_hparams::HParamsPluginData;
use tensorboard_proto::summary::{SummaryMetadata, Summary_Value};
use tensorboard_proto::tensor::TensorProto;
use tensorboard_proto::tensor_shape::TensorShapeProto_Dim;
use tensorboard_proto::types::DataType;

use super::{Image, SessionEnd};

const HISTOGRAM_BUCKETS: usize = 30;

/// `SummaryMetadata.data_class`, a field that the crate's older message lacks: its number and
/// values.
const DATA_CLASS_FIELD: u32 = 4;
const SCALAR: u64 = 1;
const TENSOR: u64 = 2;
const BLOB: u64 = 3;

/// A tag and what it means.
#[derive(Clone, Copy)]
pub(super) struct About<'a> {
    pub tag: &'a str,
    pub description: &'a str,
}

pub(super) fn bytes(message: &impl Message) -> Vec<u8> {
    message.write_to_bytes().expect("every field that proto3 has is optional")
}

/// As `simple_value`: other tools see no other form, and only this one is purged on a resume.
pub(super) fn scalar(about: About<'_>, value: f64) -> Summary_Value {
    let mut message = described(about, "scalars", Vec::new(), SCALAR);
    message.set_simple_value(to_f32(value));
    message
}

/// One cell of text; `shape` is () for a single one.
pub(super) fn strings(
    about: About<'_>,
    plugin: &str,
    shape: &[i64],
    cells: Vec<Vec<u8>>,
) -> Summary_Value {
    let mut message = described(about, plugin, Vec::new(), TENSOR);
    message.set_tensor(string_tensor(shape, cells));
    message
}

/// Width, height, and the file.
pub(super) fn image(about: About<'_>, image: &Image) -> Summary_Value {
    let side = |pixels: u32| pixels.to_string().into_bytes();
    let cells = vec![side(image.width), side(image.height), image.png.clone()];
    let mut message = described(about, "images", Vec::new(), BLOB);
    message.set_tensor(string_tensor(&[3], cells));
    message
}

fn string_tensor(shape: &[i64], cells: Vec<Vec<u8>>) -> TensorProto {
    let mut tensor = tensor(DataType::DT_STRING, shape);
    tensor.set_string_val(cells.into());
    tensor
}

pub(super) fn text(about: About<'_>, markdown: &str) -> Summary_Value {
    strings(about, "text", &[], vec![markdown.as_bytes().to_vec()])
}

/// Rows of (left edge, right edge, count).
pub(super) fn histogram(about: About<'_>, values: &[f64]) -> Summary_Value {
    let rows = buckets(values);
    let mut message = described(about, "histograms", Vec::new(), TENSOR);
    let mut tensor = tensor(DataType::DT_DOUBLE, &[rows.len() as i64, 3]);
    tensor.set_double_val(rows.concat());
    message.set_tensor(tensor);
    message
}

pub(super) fn experiment(
    name: &str,
    settings: &[(String, Value)],
    metric_tags: &[&str],
    wall_time_s: f64,
) -> Summary_Value {
    let mut data = HParamsPluginData::new();
    let experiment = data.mut_experiment();
    experiment.set_name(name.to_owned());
    experiment.set_time_created_secs(wall_time_s);
    let infos = settings.iter().filter_map(|(key, value)| {
        let mut info = HParamInfo::new();
        info.set_name(key.clone());
        info.set_field_type(match hparam(value)? {
            Hparam::Bool(_) => HparamType::DATA_TYPE_BOOL,
            Hparam::Number(_) => HparamType::DATA_TYPE_FLOAT64,
            Hparam::Text(_) => HparamType::DATA_TYPE_STRING,
        });
        Some(info)
    });
    experiment.set_hparam_infos(infos.collect());
    let metrics = metric_tags.iter().map(|&tag| {
        let mut info = MetricInfo::new();
        info.mut_name().set_tag(tag.to_owned());
        info
    });
    experiment.set_metric_infos(metrics.collect());
    hparams_data("_hparams_/experiment", bytes(&data))
}

/// One message a setting: the crate writes maps in random order, and messages written one after
/// another are read as one.
pub(super) fn session_start(settings: &[(String, Value)], wall_time_s: f64) -> Summary_Value {
    let mut start = HParamsPluginData::new();
    start.mut_session_start_info().set_start_time_secs(wall_time_s);
    let mut content = bytes(&start);
    for (key, value) in settings {
        let mut kind = protobuf::well_known_types::Value::new();
        match hparam(value) {
            None => continue,
            Some(Hparam::Bool(value)) => kind.set_bool_value(value),
            Some(Hparam::Number(value)) => kind.set_number_value(value),
            Some(Hparam::Text(value)) => kind.set_string_value(value),
        }
        let mut one = HParamsPluginData::new();
        one.mut_session_start_info().mut_hparams().insert(key.clone(), kind);
        content.extend(bytes(&one));
    }
    hparams_data("_hparams_/session_start_info", content)
}

pub(super) fn session_end(end: SessionEnd, wall_time_s: f64) -> Summary_Value {
    let mut data = HParamsPluginData::new();
    let info = data.mut_session_end_info();
    info.set_end_time_secs(wall_time_s);
    info.set_status(match end {
        SessionEnd::Success => Status::STATUS_SUCCESS,
        SessionEnd::Failure => Status::STATUS_FAILURE,
    });
    hparams_data("_hparams_/session_end_info", bytes(&data))
}

enum Hparam {
    Bool(bool),
    Number(f64),
    Text(String),
}

/// The three kinds that the hparams page has; a list is shown as its JSON, `null` not at all.
fn hparam(value: &Value) -> Option<Hparam> {
    match value {
        Value::Null => None,
        Value::Bool(value) => Some(Hparam::Bool(*value)),
        Value::Number(value) => value.as_f64().map(Hparam::Number),
        Value::String(value) => Some(Hparam::Text(value.clone())),
        list => Some(Hparam::Text(list.to_string())),
    }
}

/// The data is in the metadata; the page wants an empty tensor beside it.
fn hparams_data(tag: &str, content: Vec<u8>) -> Summary_Value {
    let mut message = described(About { tag, description: "" }, "hparams", content, TENSOR);
    message.set_tensor(tensor(DataType::DT_FLOAT, &[0]));
    message
}

fn described(about: About<'_>, plugin: &str, content: Vec<u8>, data_class: u64) -> Summary_Value {
    let mut metadata = SummaryMetadata::new();
    metadata.mut_plugin_data().set_plugin_name(plugin.to_owned());
    metadata.mut_plugin_data().set_content(content);
    if !about.description.is_empty() {
        metadata.set_display_name(about.tag.to_owned());
        metadata.set_summary_description(about.description.to_owned());
    }
    metadata.mut_unknown_fields().add_varint(DATA_CLASS_FIELD, data_class);
    let mut value = Summary_Value::new();
    value.set_tag(about.tag.to_owned());
    value.set_metadata(metadata);
    value
}

fn tensor(dtype: DataType, shape: &[i64]) -> TensorProto {
    let mut tensor = TensorProto::new();
    tensor.set_dtype(dtype);
    let dims = shape.iter().map(|&size| {
        let mut dim = TensorShapeProto_Dim::new();
        dim.set_size(size);
        dim
    });
    tensor.mut_tensor_shape().set_dim(dims.collect());
    tensor
}

/// The nearest f32 that tells the same story: what is not 0 does not become 0, what is finite stays
/// so.
fn to_f32(value: f64) -> f32 {
    let rounded = value as f32;
    if rounded == 0.0 && value != 0.0 {
        f32::from_bits(1).copysign(rounded)
    } else if rounded.is_infinite() && value.is_finite() {
        f32::MAX.copysign(rounded)
    } else {
        rounded
    }
}

/// Equal buckets from the least to the greatest finite value; one without width if they are the
/// same.
fn buckets(values: &[f64]) -> Vec<[f64; 3]> {
    let finite = || values.iter().copied().filter(|value| value.is_finite());
    let (low, high) = finite()
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
    let width = (high - low) / HISTOGRAM_BUCKETS as f64;
    if !(width > 0.0 && width.is_finite()) {
        let count = finite().count();
        return if count == 0 { Vec::new() } else { vec![[low, high, count as f64]] };
    }
    let mut rows: Vec<_> = (0..HISTOGRAM_BUCKETS)
        .map(|i| [low + i as f64 * width, low + (i + 1) as f64 * width, 0.0])
        .collect();
    rows[HISTOGRAM_BUCKETS - 1][1] = high;
    for value in finite() {
        let bucket = ((value - low) / width) as usize;
        rows[bucket.min(HISTOGRAM_BUCKETS - 1)][2] += 1.0;
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_two_bits_tell_zero_and_infinity_from_their_neighbours() {
        for (value, expect) in [
            (0.0, 0.0),
            (0.5, 0.5),
            (1e-60, f32::from_bits(1)),
            (-1e-60, -f32::from_bits(1)),
            (1e300, f32::MAX),
            (-1e300, f32::MIN),
            (f64::INFINITY, f32::INFINITY),
        ] {
            assert_eq!(to_f32(value), expect, "{value}");
        }
        assert!(to_f32(f64::NAN).is_nan());
    }

    #[test]
    fn buckets_hold_every_finite_value_once() {
        let total = |rows: &[[f64; 3]]| rows.iter().map(|row| row[2]).sum::<f64>();
        assert_eq!(buckets(&[]), Vec::<[f64; 3]>::new());
        assert_eq!(buckets(&[f64::NAN, f64::INFINITY]), Vec::<[f64; 3]>::new());
        assert_eq!(buckets(&[0.0, 0.0, f64::NAN]), [[0.0, 0.0, 2.0]]);
        assert_eq!(buckets(&[f64::MIN, f64::MAX]), [[f64::MIN, f64::MAX, 2.0]]);

        let values: Vec<f64> = (0..=300).map(|i| f64::from(i) / 10.0 - 3.0).collect();
        let rows = buckets(&values);
        assert_eq!((rows.len(), rows[0][0], rows[29][1]), (30, -3.0, 27.0));
        assert!(rows.windows(2).all(|pair| pair[0][1] == pair[1][0]));
        assert_eq!(total(&rows), 301.0);
    }
}
