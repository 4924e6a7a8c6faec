"""What each part of a GPT is good for: small trainings that differ in one thing."""
