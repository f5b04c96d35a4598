"""Putting one rank's tensors of any checkpoint onto its device, alone or together with the other ranks of its job."""
