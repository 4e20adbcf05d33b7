#!/usr/bin/env python3
"""Prints what TensorBoard reads in a folder of event files, as JSON: read_events.py FOLDER."""
import json
import sys

from tensorboard.backend.event_processing import event_accumulator
from tensorboard.plugins.hparams import plugin_data_pb2

events = event_accumulator.EventAccumulator(
    sys.argv[1], size_guidance={event_accumulator.SCALARS: 0, event_accumulator.TENSORS: 0, event_accumulator.IMAGES: 0})
events.Reload()
tags = events.Tags()
result = {
    "scalars": {tag: [[e.step, e.value] for e in events.Scalars(tag)] for tag in tags["scalars"]},
    "texts": {},
    "images": {tag: [[e.step, e.width, e.height, len(e.encoded_image_string)] for e in events.Images(tag)]
               for tag in tags["images"]},
    "hparams": {},
}
for tag in tags["tensors"]:
    metadata = events.SummaryMetadata(tag)
    if metadata.plugin_data.plugin_name == "text":
        result["texts"][tag] = [[e.step, e.tensor_proto.string_val[0].decode()] for e in events.Tensors(tag)]
data = events.summary_metadata.get("_hparams_/session_start_info")
if data is not None:
    plugin = plugin_data_pb2.HParamsPluginData.FromString(data.plugin_data.content)
    for name, value in plugin.session_start_info.hparams.items():
        result["hparams"][name] = getattr(value, value.WhichOneof("kind"))
json.dump(result, sys.stdout)
