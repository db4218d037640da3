"""The choice of a batch's next tokens from their scores, and what a decoder's loop notes of it."""
