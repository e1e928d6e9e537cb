"""Declares the two operators that torchvision registers for at import; beside a CPU build of torch it lacks them."""

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
