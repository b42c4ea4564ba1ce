"""The models: plain torch with static shapes, state passed in and out."""
