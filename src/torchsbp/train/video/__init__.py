"""Recognition of actions in clips: models, views, evaluation."""
