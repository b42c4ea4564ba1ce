"""What the models compute: plain torch with static shapes, state passed in and out."""
