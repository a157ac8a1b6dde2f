"""The room of pictures: the VAE with its tiles, edits of source images, and the PNG with its parameters."""
