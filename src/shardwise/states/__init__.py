"""The three states of training, one file for each: parameters, gradients, optimizer state."""
