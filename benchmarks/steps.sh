# What scripts of one lease share, sourced by them: steps within a limit, one after the other, with codes and logs.
# They set out and work, and have TRY, PYTHON and LIMIT (570) from whoever starts them.
try=${TRY:-} python=${PYTHON:-python3} limit=${LIMIT:-570} began=$SECONDS

pick() { if [ -n "$try" ]; then echo "$2"; else echo "$1"; fi; }  # ON_A_GPU WHEN_TRIED

left() { echo $((limit - SECONDS + began)); }

keep_logs() { tar -cJf "$out/.logs.tar.xz" -C "$work" logs && mv "$out/.logs.tar.xz" "$out/logs.tar.xz"; }

step() {  # NAME SECONDS COMMAND...: within its seconds and what is left; the end of its log goes on the screen
  local name=$1 room=$2 at=$SECONDS code
  shift 2
  if [ "$room" -gt "$(left)" ]; then room=$(left); fi
  timeout -k 5 "$((room > 1 ? room : 1))" "$@" > "$work/logs/$name.log" 2>&1
  code=$?
  echo "$name,$code,$((at - began)),$((SECONDS - began))" | tee -a "$out/steps.csv"
  tail -n 4 "$work/logs/$name.log"
  keep_logs
  return "$code"
}
