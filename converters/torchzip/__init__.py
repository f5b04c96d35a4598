"""One torch.save record: where the bytes of its tensor lie, and writing one without holding its elements."""
