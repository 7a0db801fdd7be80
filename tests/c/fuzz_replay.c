/* Runs a fuzz target over what is kept: each argument is a file, a directory of files, or - for the
 * standard input. For machines without libFuzzer, and for fuzzers that start a process per input. */
#include <dirent.h>

#include "fuzz.h"

static unsigned replayed;

static void run(FILE *f) {
    size_t size = 0, room = 4096;
    uint8_t *data = malloc(room);
    CHECK(data != NULL);
    for (size_t n; (n = fread(data + size, 1, room - size, f)) > 0;) {
        size += n;
        if (size == room) {
            data = realloc(data, room *= 2);
            CHECK(data != NULL);
        }
    }
    /* as a block of just that size, so that a checker sees a read beyond it */
    uint8_t *exact = malloc(size ? size : 1);
    CHECK(exact != NULL);
    memcpy(exact, data, size);
    free(data);
    LLVMFuzzerTestOneInput(exact, size);
    free(exact);
    replayed++;
}

static void run_file(const char *path) {
    FILE *f = fopen(path, "rbe");
    if (f == NULL) {
        FAIL("%s: %s", path, strerror(errno));
    }
    test_name = path;
    run(f);
    fclose(f);
}

int main(int argc, char **argv) {
    signal(SIGALRM, test_bark);
    alarm(test_watchdog_s);
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-") == 0) {
            run(stdin);
            continue;
        }
        DIR *d = opendir(argv[i]);
        if (d == NULL) {
            run_file(argv[i]);
            continue;
        }
        for (struct dirent *e; (e = readdir(d)) != NULL;) {
            if (e->d_name[0] != '.') {
                char path[4096];
                snprintf(path, sizeof path, "%s/%s", argv[i], e->d_name);
                run_file(path);
            }
        }
        closedir(d);
    }
    printf("%u inputs replayed\n", replayed);
    return replayed > 0 ? 0 : 1;
}
