"""The wrong formula, the wrong mask, and fewer bits than the case's dtype has."""

import torch

Tensor = torch.Tensor
