# needs: weft
# seconds: 120
# Local buffers that the application did not register, whose pages are replaced between operations
# in every way. rxe pins, so a stale cached registration would transfer the old contents. Runs with
# the default cache, without its check of the kernel's mappings, with room for one registration, and
# with none.
run() {
	for env in FI_WEFT_MR_CACHE_CHECK=1 FI_WEFT_MR_CACHE_CHECK=0 FI_MR_CACHE_MAX_COUNT=1 FI_MR_CACHE_MAX_COUNT=0; do
		echo "$env"
		export "${env?}" FI_LOG_LEVEL=warn
		fipeer_both weft weft 10.77.0.1 unregistered -n 36 >/tmp/out 2>&1 || { cat /tmp/out; return 1; }
		grep -q '^36 rounds$' /tmp/out || { cat /tmp/out; return 1; }
		grep -i 'userfaultfd' /tmp/out && { echo "nothing was kept"; return 1; }
		unset "${env%%=*}" FI_LOG_LEVEL
	done
}
