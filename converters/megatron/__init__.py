"""What a checkpoint is: the model, its arguments, how its optimizer is stored, and what is known to be damaged."""
