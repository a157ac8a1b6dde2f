"""How good pictures are: distances between sets of pictures, and how well pictures show their captions."""
