// As in the toolkit, whose NVRTC wants both files.
#pragma once
#include "crt/mma.h"
