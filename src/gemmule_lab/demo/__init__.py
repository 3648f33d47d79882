"""The main job on a real model's weights."""
