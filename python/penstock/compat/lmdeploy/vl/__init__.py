"""`lmdeploy.vl`: none of it is provided."""

from penstock.compat.lmdeploy.errors import not_provided

_REASON = "images are not supported yet"

__getattr__ = not_provided(
    "lmdeploy.vl",
    dict.fromkeys(("constants", "encode_image_base64", "load_image", "load_video", "utils"), _REASON),
)
