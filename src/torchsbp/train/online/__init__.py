"""Online action detection: which action is going on in the newest frame of a video, from all frames so far."""
