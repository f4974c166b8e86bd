"""Prints what TensorBoard's own readers find in a folder of event files, as one JSON object.

Usage: read_tensorboard.py FOLDER. Needs the packages tensorboard and numpy.
"""

import json
import math
import pathlib
import sys

from google.protobuf import json_format
from tensorboard.backend.event_processing import event_accumulator, event_file_loader
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util


def plain(value):
    """JSON has no NaN and no infinities: they are written as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN"}.get(str(value), str(value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode() if value.isascii() else value.hex()
    return value


def message(proto):
    return json_format.MessageToDict(proto, preserving_proto_field_name=True)


def cells(tensor):
    """A tensor as nested lists, text decoded."""
    values = tensor_util.make_ndarray(tensor).tolist()
    return values.decode() if isinstance(values, bytes) else plain(values)


def events(path):
    """What each record of one file is, and its step."""
    return [
        [event.WhichOneof("what"), event.step]
        for event in event_file_loader.EventFileLoader(str(path)).Load()
    ]


def read_hparams(accumulator, tags):
    found = {}
    for tag in tags:
        plugin = accumulator.SummaryMetadata(tag).plugin_data
        if plugin.plugin_name != hparams.PLUGIN_NAME:
            continue
        content = plugin.content
        if tag == hparams.EXPERIMENT_TAG:
            found["experiment"] = message(hparams.parse_experiment_plugin_data(content))
        elif tag == hparams.SESSION_START_INFO_TAG:
            found["session_start"] = message(hparams.parse_session_start_info_plugin_data(content))
        elif tag == hparams.SESSION_END_INFO_TAG:
            found["session_end"] = message(hparams.parse_session_end_info_plugin_data(content))
    return found


def main(folder):
    sizes = {kind: 0 for kind in event_accumulator.DEFAULT_SIZE_GUIDANCE}
    accumulator = event_accumulator.EventAccumulator(folder, size_guidance=sizes)
    accumulator.Reload()
    tags = accumulator.Tags()
    result = {
        "files": [events(path) for path in sorted(pathlib.Path(folder).iterdir())],
        "scalars": {
            tag: [[e.step, e.wall_time, plain(e.value)] for e in accumulator.Scalars(tag)]
            for tag in tags["scalars"]
        },
        "hparams": read_hparams(accumulator, tags["tensors"]),
        "plugins": {},
        "descriptions": {},
    }
    for tag in tags["scalars"] + tags["tensors"]:
        metadata = accumulator.SummaryMetadata(tag)
        result["plugins"][tag] = [metadata.plugin_data.plugin_name, metadata.data_class]
        result["descriptions"][tag] = [metadata.display_name, metadata.summary_description]
    result["tensors"] = {}
    for tag in tags["tensors"]:
        if tag == "custom_scalars__config__":
            (event,) = accumulator.Tensors(tag)
            layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
            result["layout"] = message(layout)
        elif not tag.startswith("_hparams_/"):
            result["tensors"][tag] = [
                [e.step, e.wall_time, cells(e.tensor_proto)] for e in accumulator.Tensors(tag)
            ]
    json.dump(result, sys.stdout, allow_nan=False)


main(*sys.argv[1:])
