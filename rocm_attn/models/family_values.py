"""families.json: values that the files of a family leave out, and its names for those of most families."""

import json
from collections.abc import Mapping
from pathlib import Path

_DATA = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
# Values of transformers' class of the config, which a published file may leave out.
DEFAULTS: Mapping[str, Mapping[str, object]] = _DATA["defaults"]
# rope_parameters, for a file without them.
ROPES: Mapping[str, Mapping[str, object]] = _DATA["ropes"]
# Names of fields -> those in the family's files.
FIELD_NAMES: Mapping[str, Mapping[str, str]] = _DATA["fields"]
# Parts of tensors' names in the family's files -> those of most models, in the order in which they are replaced.
TENSOR_NAMES: Mapping[str, Mapping[str, str]] = _DATA["tensors"]
