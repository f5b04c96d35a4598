"""Reading boxes of stored tensors, checked, cast and put onto a device."""
