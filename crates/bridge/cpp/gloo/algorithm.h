// See README.md: nothing of it is used.
#pragma once
