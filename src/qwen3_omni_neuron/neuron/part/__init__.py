"""What else the model is made of, traced from model/ and compiled by NxD, a part at a time."""
